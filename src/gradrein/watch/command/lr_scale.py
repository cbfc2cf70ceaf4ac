"""Multiply the learning rate of every optimizer during its steps, whatever a scheduler sets it to."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...errors import ArgumentError


def scale_learning_rates(factor: float) -> list[RemovableHandle]:
    """Scale learning rates from the beginning of a step to its end, and put them back.

    Args:
        factor: What to multiply by.

    Returns:
        The hooks that do it.

    Raises:
        ArgumentError: (a ValueError) not a finite number above 0.
    """
    if not 0 < factor < float("inf"):
        raise ArgumentError(f"--lr-scale must be a finite number above 0; found {factor!r}.")
    before: dict[int, list[tuple[dict[str, Any], Any]]] = {}

    def restore(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in before.pop(id(optimizer), ()):
            group["lr"] = rate

    def scale(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        restore(optimizer)  # left over from a step that raised, or that calls itself
        groups = [group for group in optimizer.param_groups if "lr" in group]
        before[id(optimizer)] = [(group, group["lr"]) for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor

    return [register_optimizer_step_pre_hook(scale), register_optimizer_step_post_hook(restore)]
