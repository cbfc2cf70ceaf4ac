from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._check import order, tensor_limit, threshold
from .._decision import Scale, down_to
from .._gradients import Gradients

__all__ = ["by_parameter"]


@dataclass(frozen=True)
class _ByParameter:
    max_norm: float | Tensor
    p: float

    def check(self, grads: Gradients) -> None:  # noqa: ARG002  # the limit does not depend on them
        tensor_limit(self.max_norm, "max_norm")

    def decide(self, grads: Gradients) -> Scale:
        return Scale(down_to(self.max_norm, grads.norms(self.p)))


def by_parameter(max_norm: float | Tensor, p: float | str = 2.0) -> _ByParameter:
    """Each gradient by its own norm: one exploding layer does not shrink the others.

    Args:
        max_norm: the largest norm allowed for each gradient, a number or a 0-dim tensor.
        p: the order of the norm.

    Returns:
        A policy for `bridle.clip_`.

    Example:
        >>> large, small = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        >>> large.grad, small.grad = torch.tensor([100.0]), torch.tensor([0.5])
        >>> report = bridle.clip_([large, small], bridle.by_parameter(1.0))
        >>> large.grad, small.grad
        (tensor([1.]), tensor([0.5000]))
    """
    return _ByParameter(threshold(max_norm, "max_norm"), order(p))
