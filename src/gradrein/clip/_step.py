"""Clip at `optimizer.step()`: after closures, on unscaled gradients, and with nothing moved in a skipped step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch.training import StepHook
from . import _apply
from ._report import ClipReport


class StepClipper:
    """Call `clip` at the start of each step of an optimizer.

    Args:
        optimizer: Whose gradients to clip.
        clip: Clips and returns its report. Its argument says whether a GradScaler drives the step, and so has looked
            for values that are not finite itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clip: Callable[[bool], ClipReport]) -> None:
        self._optimizer: Any = optimizer  # Any: torch hangs attributes on it that its type does not have
        self._clip = clip
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._hook = StepHook(optimizer, self._on_gradients, self._on_end)

    def remove(self) -> None:
        """Clip no more."""
        self._hook.remove()

    def _on_gradients(self, again: bool) -> None:
        if not again:
            self._withheld = []  # of a step that raised
        driven = getattr(self._optimizer, "found_inf", None) is not None
        with torch.no_grad():
            self._unscale()
            report = self._clip(driven)
        self._withhold(report._known_skips(self._parameters()))

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _unscale(self) -> None:
        """Divide by the scale that a `GradScaler` has left to a fused optimizer: a policy looks at true gradients."""
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is None:
            return
        grads = {id(p.grad): p.grad for p in self._parameters()}
        _apply.scale_([g for g in grads.values() if g is not None], 1.0 / scale.double())
        self._optimizer.grad_scale = None

    def _withhold(self, parameters: list[Tensor]) -> None:
        """Take skipped gradients away: an optimizer leaves a parameter without a gradient alone."""
        for p in parameters:
            if p.grad is not None:
                self._withheld.append((p, p.grad))
                p.grad = None

    def _on_end(self) -> None:
        for parameter, grad in self._withheld:
            if parameter.grad is None:  # a closure may have made a new one since
                parameter.grad = grad
        self._withheld = []
