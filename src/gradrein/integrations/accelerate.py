"""Monitor what `Accelerator.prepare` returns."""

import os
from typing import Any

from ..watch import ClipOption, Monitor
from ._missing import missing

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing("accelerate", "accelerate") from error


def monitor(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    record: str | os.PathLike[str] | None = None,
    clip: ClipOption = None,
    every: int = 1,
) -> Monitor:
    """Return a `gradrein.Monitor` for a prepared model and optimizer: the names are the model's own.

    Args:
        accelerator: The accelerator that prepared them.
        model: The model, prepared or not.
        optimizer: The optimizer, prepared or not.
        record: The file to write. Each of several processes writes its own, as `gradrein.Monitor` does.
        clip: As in `gradrein.Monitor`, instead of `accelerator.clip_grad_norm_`; with both, both clip.
        every: Record every so many steps.

    Returns:
        The monitor, for a `with` block.
    """
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    return Monitor(accelerator.unwrap_model(model), inner, record=record, clip=clip, every=every)
