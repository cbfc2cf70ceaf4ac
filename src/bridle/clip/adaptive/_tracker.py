from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._check import number
from ._adaptive import Adaptive, Bounds
from ._memory import State

__all__ = ["by_tracked_quantile"]


@dataclass(frozen=True)
class _TrackedQuantile:
    q: float
    rate: float
    kind: ClassVar[str] = "by_tracked_quantile"
    replaces: ClassVar[bool] = False

    def blank(self) -> dict[str, Tensor]:
        return {"estimate": torch.zeros((), dtype=torch.float64)}

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        estimate = torch.where(state["seen"] == 0, norm, state["estimate"])
        below = (norm <= estimate).to(norm.dtype)
        return bounds.hold(estimate), {"estimate": estimate * torch.exp(-self.rate * (below - self.q))}


def by_tracked_quantile(
    q: float = 0.5,
    rate: float = 0.2,
    *,
    each: bool = False,
    warmup: int = 0,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> Adaptive:
    """Clip to a quantile of the norms that is tracked by one number, without a history.

    `C <- C exp(-rate (b - q))`, where b is 1 if the norm was at most C and 0 if it was above: C settles where the
    share q of all norms lies below it. It starts at the first norm. Andrew et al., Differentially Private Learning
    with Adaptive Clipping (arXiv 1905.03871), without the noise.

    Args:
        q: which quantile, from 0 to 1; 0.5 is the median.
        rate: how far one step moves the estimate, on a logarithmic scale.
        each: an estimate for each gradient rather than one for their total norm.
        warmup: norms to learn from before clipping by them; until then only `ceiling` holds.
        floor: a norm below this is never clipped.
        ceiling: a norm above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_tracked_quantile()
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = bridle.clip_([weight], policy)
        >>> report.norm, round(report.norm_after, 3)
        (9.0, 0.905)
    """
    rule = _TrackedQuantile(number(q, "q", 0, 1), number(rate, "rate"))
    return Adaptive(rule, each=each, warmup=warmup, floor=floor, ceiling=ceiling)
