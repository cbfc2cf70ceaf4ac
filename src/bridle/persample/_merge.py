"""One piece for a value that is used in several places."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._grams import Grams
from ._pieces import ALL, Dense, Piece, redo_where_lost
from .rules.embedding import Rows, rows_with_outer
from .rules.linear import Outer
from .rules.members import Members


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
        crosses = [cross_products(a, b) for i, a in enumerate(self.pieces) for b in self.pieces[i + 1 :]]
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


def cross_products(a: Piece, b: Piece) -> Tensor | None:
    """Return the inner product of both gradients of each sample where a short way is known, else None."""
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Rows) and isinstance(other, Outer):
            return rows_with_outer(one, other)
    return None


def merged(pieces: Sequence[Piece]) -> Piece:
    """Return one piece for all uses of a value."""
    if len(pieces) == 1:
        return pieces[0]
    for kind in (Outer, Rows, Members):
        same = [piece for piece in pieces if isinstance(piece, kind)]
        if len(same) > 1:
            rest = [piece for piece in pieces if not isinstance(piece, kind)]
            return merged([kind.joined(same), *rest])  # type: ignore[arg-type]
    small = [piece for piece in pieces if isinstance(piece, Dense)]
    if len(small) > 1:
        rest = [piece for piece in pieces if not isinstance(piece, Dense)]
        total = small[0].values
        for piece in small[1:]:
            total = total + piece.values
        return merged([Dense(total), *rest])
    return Sum(pieces)
