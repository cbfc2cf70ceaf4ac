"""A value that is used in several places: its gradients are a sum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ALL, SampleGrads, norms_of_squares
from .numerics import on_host


class Sum(SampleGrads):
    """The gradients of a value that is used in several places."""

    def __init__(self, uses: Sequence[SampleGrads]) -> None:
        self.uses = tuple(uses)
        self.samples, self.shape = uses[0].samples, uses[0].shape
        self.strategy = "+".join(dict.fromkeys(use.strategy for use in uses))
        self.held_tensors = tuple(tensor for use in uses for tensor in use.held_tensors)

    def dense(self, part: slice = ALL) -> Tensor:
        total = self.uses[0].dense(part)
        for use in self.uses[1:]:
            total = total + use.dense(part)
        return total

    def norms(self) -> Tensor:
        crosses = [_cross(a, b) for i, a in enumerate(self.uses) for b in self.uses[i + 1 :]]
        if not all(map(on_host, self.held_tensors)) or any(cross is None for cross in crosses):
            return super().norms()
        each = torch.stack([use.norms() for use in self.uses])
        total = each.square().sum(0)
        bound = total.clone()  # of the absolute values whose sum this is; rounding errors are about eps as large
        for cross in crosses:
            assert cross is not None
            total += 2 * cross
            bound += 2 * cross.abs()
        error_bound = bound * torch.finfo(torch.float32).eps + torch.finfo(torch.float64).tiny
        return norms_of_squares(self, total, error_bound.where(each.amax(0) > 0, 0))

    def weighted(self, weights: Tensor) -> Tensor:
        parts = [use.weighted(weights) for use in self.uses]
        return torch.stack([part.to_dense() if part.is_sparse else part for part in parts]).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        return torch.stack([use.dot(direction) for use in self.uses]).sum(0)


def _cross(a: SampleGrads, b: SampleGrads) -> Tensor | None:
    found = a.cross(b)
    return b.cross(a) if found is None else found


def merged(uses: Sequence[SampleGrads]) -> SampleGrads:
    """Return the gradients of a value with several uses: those in one representation joined, then their sum."""
    if len(uses) == 1:
        return uses[0]
    by_type: dict[type[SampleGrads], list[SampleGrads]] = {}
    for use in uses:
        by_type.setdefault(type(use), []).append(use)
    whole: list[SampleGrads] = []
    for first, *rest in by_type.values():
        joined = first.joined(rest) if rest else first
        whole += [first, *rest] if joined is None else [joined]
    return whole[0] if len(whole) == 1 else Sum(whole)
