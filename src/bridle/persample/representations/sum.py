"""One piece for a value that is used in several places."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ALL, Piece, redo_where_lost
from .gram_cache import Grams


class Sum(Piece):
    """The gradients of a value that is used in several places."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.samples, self.shape = pieces[0].samples, pieces[0].shape
        self.how = "+".join(dict.fromkeys(piece.how for piece in pieces))

    def dense(self, part: slice = ALL) -> Tensor:
        total = self.pieces[0].dense(part)
        for piece in self.pieces[1:]:
            total = total + piece.dense(part)
        return total

    def squared_norms(self, grams: Grams | None = None) -> Tensor:
        crosses = [_cross(a, b) for i, a in enumerate(self.pieces) for b in self.pieces[i + 1 :]]
        if any(cross is None for cross in crosses):
            return super().squared_norms()
        total = torch.stack([piece.squared_norms(grams) for piece in self.pieces]).sum(0)
        bound = total.clone()  # of the absolute values whose sum this is; rounding errors are about eps as large
        for cross in crosses:
            assert cross is not None
            total += 2 * cross
            bound += 2 * cross.abs()
        return redo_where_lost(self, total, bound * torch.finfo(torch.float32).eps)

    def holds(self) -> tuple[Tensor, ...]:
        return tuple(tensor for piece in self.pieces for tensor in piece.holds())

    def factors(self) -> tuple[Tensor, ...]:
        return tuple(factor for piece in self.pieces for factor in piece.factors())

    def weighted(self, weights: Tensor) -> Tensor:
        parts = [piece.weighted(weights) for piece in self.pieces]
        return torch.stack([part.to_dense() if part.is_sparse else part for part in parts]).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        return torch.stack([piece.dot(direction) for piece in self.pieces]).sum(0)


def _cross(a: Piece, b: Piece) -> Tensor | None:
    found = a.cross(b)
    return b.cross(a) if found is None else found


def merged(pieces: Sequence[Piece]) -> Piece:
    """Return the gradients of a value with several uses: those in one form joined, then their sum."""
    by_form: dict[type[Piece], list[Piece]] = {}
    for piece in pieces:
        by_form.setdefault(type(piece), []).append(piece)
    whole: list[Piece] = []
    for first, *rest in by_form.values():
        joined = first.joined(rest) if rest else first
        whole += [first, *rest] if joined is None else [joined]
    return whole[0] if len(whole) == 1 else Sum(whole)
