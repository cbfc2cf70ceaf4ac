"""Multiply the learning rate of every optimizer during its steps, whatever a scheduler sets it to."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import ArgumentError


class LearningRateScale:
    """Scales the learning rate from the beginning of a step to its end, and puts it back.

    Args:
        factor: What to multiply by.

    Raises:
        ArgumentError: (a ValueError) not a finite number above 0.
    """

    def __init__(self, factor: float) -> None:
        if not 0 < factor < float("inf"):
            raise ArgumentError(f"--lr-scale must be a finite number above 0; found {factor!r}.")
        self._factor = factor
        self._before: dict[int, list[tuple[dict[str, Any], Any]]] = {}
        self._hooks = [
            register_optimizer_step_pre_hook(self._scale),
            register_optimizer_step_post_hook(self._restore),
        ]

    def remove(self) -> None:
        """Leave learning rates alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _scale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # left over from a step that raised, or that calls itself
        groups = [group for group in optimizer.param_groups if "lr" in group]
        self._before[id(optimizer)] = [(group, group["lr"]) for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._factor

    def _restore(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in self._before.pop(id(optimizer), ()):
            group["lr"] = rate
