from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._check import order, tensor_limit, threshold
from .._decision import Scale, down_to
from .._gradients import Gradients

__all__ = ["by_norm"]


@dataclass(frozen=True)
class _ByNorm:
    max_norm: float | Tensor
    p: float

    def check(self, grads: Gradients) -> None:  # noqa: ARG002  # the limit does not depend on them
        tensor_limit(self.max_norm, "max_norm")

    def decide(self, grads: Gradients) -> Scale:
        return Scale(down_to(self.max_norm, grads.total(self.p)))


def by_norm(max_norm: float | Tensor, p: float | str = 2.0) -> _ByNorm:
    """One norm over all gradients, brought down to `max_norm` by one factor: `min(1, max_norm / norm)`.

    Unlike `clip_grad_norm_` there is no epsilon in the division: a norm at the threshold stays there.

    Args:
        max_norm: the largest norm allowed, a number or a 0-dim tensor (which is never read from its device).
        p: the order of the norm.

    Returns:
        A policy for `bridle.clip_`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> bridle.clip_([weight], bridle.by_norm(1.0)).norm
        5.0
    """
    return _ByNorm(threshold(max_norm, "max_norm"), order(p))
