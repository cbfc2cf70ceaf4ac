"""Clip and monitor what `Accelerator.prepare` returns."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..clip import ClipReport, NonFinite
from ..clip import clip_ as _clip
from ..errors import ArgumentError, ArgumentTypeError
from ..watch import ClipOption, Layers, Monitor
from ._clipping import ClipPolicy, policies_of
from ._missing import missing

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing("accelerate", "accelerate") from error


def clip_(
    accelerator: Accelerator, model: Any, policy: ClipPolicy, *, nonfinite: NonFinite = "raise"
) -> ClipReport | None:
    """Clip the gradients of a prepared model: in place of `accelerator.clip_grad_norm_`, right under DDP and FSDP2.

    Unscales gradients first under mixed precision, as the accelerator does.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The model, prepared or not; or parameters, or an optimizer, as for `gradrein.clip_`.
        policy: The largest norm; or a policy; or a mapping from name patterns to those. A policy that learns is built
            once, outside of the loop.
        nonfinite: As in `gradrein.clip_`. Under a GradScaler, which skips such steps itself, it does not apply.

    Raises:
        ArgumentError: (a ValueError) A policy by name, which could not learn, or an invalid one.

    Returns:
        What was done; None while gradients are accumulated, where nothing is clipped yet.
    """
    _check(accelerator)
    given = [*policy.values()] if isinstance(policy, Mapping) else [policy]
    if any(isinstance(each, str) for each in given):
        raise ArgumentError(
            f"clip_: found a policy by name, {policy!r:.80}, which would be built anew in each call and never learn. "
            "Build it once, outside of the loop, such as gradrein.policies.ByOvershoot() for 'auto', and pass that."
        )
    if not accelerator.sync_gradients:
        return None
    accelerator.unscale_gradients()
    inner, scaled = _inner(accelerator, model), accelerator.scaler is not None
    return _clip(inner, policies_of(policy), nonfinite="propagate" if scaled else nonfinite)


def monitor(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    record: str | os.PathLike[str] | None = None,
    clip: ClipOption = None,
    norms: Layers | None = None,
    every: int = 1,
) -> Monitor:
    """Return a `gradrein.Monitor` for a prepared model and optimizer: the names are the model's own.

    Args:
        accelerator: The accelerator that prepared them.
        model: The model, prepared or not.
        optimizer: The optimizer, prepared or not.
        record: The file to write. Each of several processes writes its own, as `gradrein.Monitor` does.
        clip: As in `gradrein.Monitor`, instead of `accelerator.clip_grad_norm_`; with both, both clip.
        norms: As in `gradrein.Monitor`: numbers by layer for `latest`.
        every: Record every so many steps.

    Returns:
        The monitor, for a `with` block.
    """
    _check(accelerator)
    watched = _inner(accelerator, model), _inner(accelerator, optimizer)
    return Monitor(*watched, record=record, clip=clip, norms=norms, every=every)


def _check(accelerator: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise ArgumentTypeError(
            f"the first argument is the Accelerator, found {type(accelerator).__name__}. Call "
            "clip_(accelerator, model, 1.0) or monitor(accelerator, model, optimizer)."
        )


def _inner(accelerator: Accelerator, prepared: Any) -> Any:
    """Return what was prepared as it was before."""
    if isinstance(prepared, torch.nn.Module):
        return accelerator.unwrap_model(prepared)
    return prepared.optimizer if isinstance(prepared, AcceleratedOptimizer) else prepared
