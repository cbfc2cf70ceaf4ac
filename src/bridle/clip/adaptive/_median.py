from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .._check import number
from ._adaptive import Adaptive, Bounds, count
from ._memory import State
from ._window import blank, push, quantile

__all__ = ["by_median"]


@dataclass(frozen=True)
class _Median:
    k: float
    window: int
    kind: ClassVar[str] = "by_median"
    replaces: ClassVar[bool] = False

    def blank(self) -> dict[str, Tensor]:
        return {"window": blank(self.window)}

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        limit = bounds.hold(self.k * quantile(state["window"], 0.5))
        return limit, {"window": push(state["window"], state["seen"], norm)}


def by_median(
    k: float = 2.0,
    window: int = 128,
    *,
    each: bool = False,
    warmup: int = 10,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> Adaptive:
    """Clip to `k` times the median of the norms before this one.

    `limit = k median(last norms before clipping)`. Nearly half of the window may be outliers and the limit is still
    a sane one. As in ScaledAdam of the icefall speech recipes (Yao et al., Zipformer, arXiv 2310.11230), with k = 2.

    Args:
        k: how many times the median is too large.
        window: how many norms to remember.
        each: a history for each gradient rather than one of their total norm.
        warmup: norms to learn from before clipping by them; until then only `ceiling` holds.
        floor: a norm below this is never clipped.
        ceiling: a norm above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_median(warmup=3)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 100.0, 2.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = bridle.clip_([weight], policy)
        >>> report.norm, report.norm_after
        (9.0, 4.0)
    """
    rule = _Median(number(k, "k"), count(window, "window"))
    return Adaptive(rule, each=each, warmup=warmup, floor=floor, ceiling=ceiling)
