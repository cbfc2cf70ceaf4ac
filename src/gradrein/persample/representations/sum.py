"""A value that is used in several places: its gradients are a sum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ALL, SampleGrads, redo_where_lost


class Sum(SampleGrads):
    """The gradients of a value that is used in several places."""

    def __init__(self, forms: Sequence[SampleGrads]) -> None:
        self.forms = tuple(forms)
        self.samples, self.shape = forms[0].samples, forms[0].shape
        self.strategy = "+".join(dict.fromkeys(form.strategy for form in forms))
        self.held_tensors = tuple(tensor for form in forms for tensor in form.held_tensors)

    def dense(self, part: slice = ALL) -> Tensor:
        total = self.forms[0].dense(part)
        for form in self.forms[1:]:
            total = total + form.dense(part)
        return total

    def squared_norms(self) -> Tensor:
        crosses = [_cross(a, b) for i, a in enumerate(self.forms) for b in self.forms[i + 1 :]]
        if any(cross is None for cross in crosses):
            return super().squared_norms()
        total = torch.stack([form.squared_norms() for form in self.forms]).sum(0)
        bound = total.clone()  # of the absolute values whose sum this is; rounding errors are about eps as large
        for cross in crosses:
            assert cross is not None
            total += 2 * cross
            bound += 2 * cross.abs()
        return redo_where_lost(self, total, bound * torch.finfo(torch.float32).eps)

    def weighted(self, weights: Tensor) -> Tensor:
        parts = [form.weighted(weights) for form in self.forms]
        return torch.stack([part.to_dense() if part.is_sparse else part for part in parts]).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        return torch.stack([form.dot(direction) for form in self.forms]).sum(0)


def _cross(a: SampleGrads, b: SampleGrads) -> Tensor | None:
    found = a.cross(b)
    return b.cross(a) if found is None else found


def merged(forms: Sequence[SampleGrads]) -> SampleGrads:
    """Return the gradients of a value with several uses: those in one form joined, then their sum."""
    if len(forms) == 1:
        return forms[0]
    by_form: dict[type[SampleGrads], list[SampleGrads]] = {}
    for form in forms:
        by_form.setdefault(type(form), []).append(form)
    whole: list[SampleGrads] = []
    for first, *rest in by_form.values():
        joined = first.joined(rest) if rest else first
        whole += [first, *rest] if joined is None else [joined]
    return whole[0] if len(whole) == 1 else Sum(whole)
