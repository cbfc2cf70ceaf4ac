"""A monitor for what `Accelerator.prepare` returns."""

from __future__ import annotations

import os
from typing import Any

from ..watch import ClipOption, Monitor
from ._missing import missing

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing("accelerate", "accelerate") from error

__all__ = ["monitor"]


def monitor(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    record: str | os.PathLike[str] | None = None,
    clip: ClipOption = None,
    every: int = 1,
) -> Monitor:
    """A `bridle.Monitor` for a prepared model and optimizer: the names are the model's own.

    Args:
        accelerator: the accelerator that prepared them.
        model: the model, prepared or not.
        optimizer: the optimizer, prepared or not.
        record: the file to write; of several processes each writes its own, as `bridle.Monitor` does.
        clip: as in `bridle.Monitor`; do not call `accelerator.clip_grad_norm_` then.
        every: record every so many steps.

    Returns:
        The monitor, for a `with` block.
    """
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return Monitor(accelerator.unwrap_model(model), inner, record=record, clip=clip, every=every)
