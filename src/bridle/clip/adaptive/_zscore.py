from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._check import number
from ._adaptive import Adaptive, Bounds
from ._memory import State

__all__ = ["by_zscore"]


@dataclass(frozen=True)
class _ZScore:
    z: float
    decay: float
    kind: ClassVar[str] = "by_zscore"
    replaces: ClassVar[bool] = False

    def blank(self) -> dict[str, Tensor]:
        return {"mean": torch.zeros((), dtype=torch.float64), "variance": torch.zeros((), dtype=torch.float64)}

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        mean, variance, seen = state["mean"], state["variance"], state["seen"]
        above = norm - mean
        # mean + z² sd / z_t with z_t = above / sd, written so that a zero deviation divides nothing.
        spike = above > self.z * variance.sqrt()
        limit = bounds.hold(torch.where(spike & (seen > 0), mean + self.z**2 * variance / above, math.inf))
        held = torch.minimum(norm, limit)
        # During warm-up the plain mean and variance of all norms so far, moving averages of the same afterwards.
        weight = torch.where(bounds.warm | (seen == 0), 1 / (seen + 1), 1 - self.decay)
        new_mean = mean + weight * (held - mean)
        off = torch.where(bounds.warm | (seen == 0), (held - mean) * (held - new_mean), (held - new_mean) ** 2)
        return limit, {"mean": new_mean, "variance": variance + weight * (off - variance)}


def by_zscore(
    z: float = 2.5,
    decay: float = 0.97,
    *,
    each: bool = False,
    warmup: int = 25,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> Adaptive:
    """Clip a norm that lies more than `z` standard deviations above the running mean.

    With `z_t = (norm - mean) / sd`: where `z_t > z` the norm becomes `mean + z² sd / z_t`, so the larger the
    outlier the closer to the mean it is brought. Mean and variance are moving averages of the norms *after*
    clipping; during warm-up they are the plain mean and variance of what was seen. Kumar et al., ZClip
    (arXiv 2504.02507).

    Args:
        z: how many standard deviations are too many.
        decay: how much of the old averages a step keeps.
        each: one mean for each gradient rather than one for their total norm.
        warmup: norms to learn from before clipping by them; until then only `ceiling` holds.
        floor: a norm below this is never clipped.
        ceiling: a norm above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_zscore(warmup=4)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 1.2, 0.8, 1.0, 50.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = bridle.clip_([weight], policy)
        >>> report.norm, round(report.norm_after, 3)
        (50.0, 1.003)
    """
    rule = _ZScore(number(z, "z"), number(decay, "decay", 0, 1))
    return Adaptive(rule, each=each, warmup=warmup, floor=floor, ceiling=ceiling)
