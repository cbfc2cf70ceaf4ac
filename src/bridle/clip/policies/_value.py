from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .._check import tensor_limit, threshold
from .._decision import Clamp
from .._gradients import Gradients

__all__ = ["by_value"]


@dataclass(frozen=True)
class _ByValue:
    limit: float | Tensor
    p: float = math.inf

    def check(self, grads: Gradients) -> None:  # noqa: ARG002  # the limit does not depend on them
        tensor_limit(self.limit, "limit")

    def decide(self, grads: Gradients) -> Clamp:  # noqa: ARG002  # the limit does not depend on them
        return Clamp(self.limit)


def by_value(limit: float | Tensor) -> _ByValue:
    """Every element limited to `[-limit, limit]` (of a complex one, its magnitude). Changes the direction.

    Args:
        limit: the largest magnitude allowed, a number or a 0-dim tensor.

    Returns:
        A policy for `bridle.clip_`. Its report shows the largest magnitude as the norm.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -0.25])
        >>> report = bridle.clip_([weight], bridle.by_value(1.0))
        >>> weight.grad, report.norm
        (tensor([ 1.0000, -0.2500]), 3.0)
    """
    return _ByValue(threshold(limit, "limit"))
