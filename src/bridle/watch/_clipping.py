"""What clipping, the script's or ours, means for the numbers of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..clip import ClipReport
from ..errors import UnsupportedGradientError
from ._pieces import readable
from ._probe import Reading
from ._record import rounded
from ._torch import folded_scale, is_flattened

__all__ = ["Heard", "before_clipping", "done", "refuse_flattened", "sized"]


@dataclass(frozen=True)
class Heard:
    """A call of `clip_grad_norm_` in the script: on what, the limit, the norm it found and the order of that norm."""

    parameters: list[Tensor]
    limit: float
    norm: Tensor
    order: float


def before_clipping(
    optimizer: torch.optim.Optimizer, reading: Reading, heard: Heard | None
) -> tuple[float | None, list[float | None], dict[str, Any]]:
    """The norms as they were before the script itself clipped, and what it did."""
    if (folded := folded_scale(optimizer)) is not None:
        return reading.norm, reading.norms, {"clip": rounded([folded])[0]}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    if heard is None or {id(p) for p in heard.parameters if p.grad is not None} != stepped:
        return reading.norm, reading.norms, {}
    if not math.isfinite(heard.limit):  # the script only wanted to know the norm
        return reading.norm, reading.norms, {}
    told = readable(heard.norm)
    if told is None:
        raise UnsupportedGradientError("the norm the script clipped by is one that ranks have not yet added up.")
    before = float(told)
    factor = min(1.0, heard.limit / (before + 1e-6)) if math.isfinite(before) else 1.0  # as clip_grad_norm_ has it
    factor = factor if 0 < factor < 1 - 1e-5 else 1.0
    norms = [None if n is None else n / factor for n in reading.norms]
    norm = reading.norm / factor if reading.norm is not None else before if heard.order == 2.0 else None
    return norm, norms, {"clip": rounded([factor])[0], "limit": heard.limit}


def sized(norm: float | None) -> dict[str, Any]:
    """The norm of a step; nothing where it is not known."""
    size = rounded([norm], 9)[0]
    return {} if size is None else {"norm": size, "peak": size}


def done(report: ClipReport) -> dict[str, Any]:
    """What our own clipping did."""
    if report.skipped:
        return {"clip": 0.0}
    factor = report.coefficient
    if factor is None:  # values were limited, each by itself: how much of the norm is left
        factor = report.norm_after / report.norm if report.norm else 1.0
    return {"clip": rounded([factor])[0]}


def refuse_flattened(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to clip pieces that do not say what they are pieces of.

    Raises:
        UnsupportedGradientError: parameters of torch's first FullyShardedDataParallel.
    """
    if any(is_flattened(p) for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedGradientError(
            "the parameters are flattened by torch's first FullyShardedDataParallel, whose pieces do not say what they "
            "are pieces of: each rank would clip by a norm of its own. Use its clip_grad_norm_, or fully_shard."
        )
