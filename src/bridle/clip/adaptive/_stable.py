from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._check import number
from ._adaptive import Adaptive, Bounds
from ._memory import State

__all__ = ["by_stable_norm"]

_EPS = 1e-8


@dataclass(frozen=True)
class _StableNorm:
    decay: float
    square_decay: float
    kind: ClassVar[str] = "by_stable_norm"
    replaces: ClassVar[bool] = True

    def blank(self) -> dict[str, Tensor]:
        return {"mean": torch.zeros((), dtype=torch.float64), "rms": torch.zeros((), dtype=torch.float64)}

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.decay * state["mean"] + (1 - self.decay) * norm
        # The root of the moving average of squares, so that no square overflows or vanishes.
        rms = torch.hypot(math.sqrt(self.square_decay) * state["rms"], math.sqrt(1 - self.square_decay) * norm)
        times = state["seen"] + 1
        unbiased_mean = mean / (1 - self.decay**times)
        unbiased_rms = rms / (1 - self.square_decay**times).sqrt()
        return bounds.hold(unbiased_mean / (unbiased_rms + _EPS)), {"mean": mean, "rms": rms}


def by_stable_norm(
    decay: float = 0.7,
    square_decay: float = 0.9,
    *,
    each: bool = True,
    warmup: int = 0,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> Adaptive:
    """Keep the direction of each gradient and replace its norm by a steady one, near 1.

    `norm <- m / (sqrt(v) + 1e-8)`, where m and v are moving averages of the norm and of its square, corrected for
    their start at zero. A spike raises both, so the result stays bounded whatever its size. This changes the scale
    of *every* step, up as well as down: meant for optimizers that divide the scale out again (Adam and kin); with
    plain SGD the learning rate becomes the length of a step. Huang et al., GradientStabilizer (arXiv 2502.17055).

    Args:
        decay: how much of the average norm a step keeps.
        square_decay: how much of the average squared norm a step keeps.
        each: averages for each gradient rather than for their total norm.
        warmup: norms to learn from before replacing any.
        floor: the least norm to give, at most 65504 (the largest float16).
        ceiling: the largest norm to give.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_stable_norm()
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> for size in (1.0, 1.0, 1000.0):
        ...     weight.grad = torch.tensor([3.0, 4.0]) * size
        ...     report = bridle.clip_([weight], policy)
        >>> report.norm, round(report.norm_after, 3)
        (5000.0, 0.753)
    """
    if number(decay, "decay", 0, 1) == 1 or number(square_decay, "square_decay", 0, 1) == 1:
        raise ArgumentError("a decay of 1 never learns; pass a number below 1.")
    rule = _StableNorm(float(decay), float(square_decay))
    least = number(floor, "floor", 0, torch.finfo(torch.float16).max)  # no gradient may become infinite by it
    return Adaptive(rule, each=each, warmup=warmup, floor=least, ceiling=ceiling)
