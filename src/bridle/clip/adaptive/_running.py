from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._check import number
from ._adaptive import Adaptive, Bounds
from ._memory import State

__all__ = ["by_running_norm"]


@dataclass(frozen=True)
class _RunningNorm:
    k: float
    decay: float
    kind: ClassVar[str] = "by_running_norm"
    replaces: ClassVar[bool] = False

    def blank(self) -> dict[str, Tensor]:
        return {"size": torch.full((), math.inf, dtype=torch.float64)}

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        size = state["size"]
        limit = bounds.hold(self.k * size)
        held = torch.minimum(norm, limit)
        average = self.decay * size + (1 - self.decay) * held
        return limit, {"size": torch.where(bounds.warm | (state["seen"] == 0), torch.minimum(size, held), average)}


def by_running_norm(
    k: float = 1.05,
    decay: float = 0.98,
    *,
    each: bool = True,
    warmup: int = 100,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> Adaptive:
    """Clip each gradient to `k` times the running average of its own norms.

    `limit = k s`, with `s <- decay s + (1 - decay) clipped norm`; during warm-up s is the smallest norm so far.
    Norms can grow by at most `1 + (1 - decay)(k - 1)` a step, so a norm that was tiny once in warm-up holds
    a gradient down for long: a `floor` prevents that. Wang et al., AdaGC (arXiv 2502.11034). There, warm-up clips
    by the total norm; here by `ceiling` for each.

    Args:
        k: how many times the average is too large.
        decay: how much of the old average a step keeps.
        each: an average for each gradient, as in the paper, rather than one for their total norm.
        warmup: norms to learn from before clipping by them; until then only `ceiling` holds.
        floor: a norm below this is never clipped.
        ceiling: a norm above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_running_norm(warmup=3)
        >>> calm, wild = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 1.0, 1.0, 40.0):
        ...     calm.grad, wild.grad = torch.tensor([1.0]), torch.tensor([size])
        ...     report = bridle.clip_({"calm": calm, "wild": wild}, policy)
        >>> report.norms_after
        {'calm': 1.0, 'wild': 1.05}
    """
    rule = _RunningNorm(number(k, "k"), number(decay, "decay", 0, 1))
    return Adaptive(rule, each=each, warmup=warmup, floor=floor, ceiling=ceiling)
