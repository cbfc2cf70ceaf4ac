from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .._check import number
from ._adaptive import Adaptive, Bounds, count
from ._memory import State
from ._window import blank, push, quantile

__all__ = ["by_quantile"]


@dataclass(frozen=True)
class _Quantile:
    q: float
    window: int
    kind: ClassVar[str] = "by_quantile"
    replaces: ClassVar[bool] = False

    def blank(self) -> dict[str, Tensor]:
        return {"window": blank(self.window)}

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        window = push(state["window"], state["seen"], norm)
        return bounds.hold(quantile(window, self.q)), {"window": window}


def by_quantile(
    q: float = 0.1,
    window: int = 1000,
    *,
    each: bool = False,
    warmup: int = 0,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> Adaptive:
    """Clip to a quantile of the norms seen so far, this one included.

    `limit = quantile(last norms before clipping, q)`. The default, the tenth percentile, clips nine steps of ten:
    in effect the step length follows the calm part of the run. Use 0.9 to clip only the largest tenth.
    Seetharaman et al., AutoClip (arXiv 2007.14469).

    Args:
        q: which quantile, from 0 to 1.
        window: how many norms to remember (the paper: all of them).
        each: a history for each gradient rather than one of their total norm.
        warmup: norms to learn from before clipping by them; until then only `ceiling` holds.
        floor: a norm below this is never clipped.
        ceiling: a norm above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_quantile(0.5)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 2.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = bridle.clip_([weight], policy)
        >>> report.norm, report.norm_after
        (9.0, 2.0)
    """
    rule = _Quantile(number(q, "q", 0, 1), count(window, "window"))
    return Adaptive(rule, each=each, warmup=warmup, floor=floor, ceiling=ceiling)
