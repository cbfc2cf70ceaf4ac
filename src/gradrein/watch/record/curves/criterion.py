"""Losses computed without gradients by a function that also computes the training loss.

The loss functions of `torch.nn.functional`, which the modules of `torch.nn` call, are replaced while somebody observes.
What they return is passed on as it is; values are added up on the device and read at the next step.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function

from ...._torch.modes import inside_func_transform, is_tracing, script_instead
from ..replace import replace

_NAMES = [
    name
    for name in vars(F)
    if name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits")) or name == "kl_div"
]


class CriterionLosses:
    """Collects the losses that are computed without gradients since the last step, by function."""

    def __init__(self) -> None:
        self._trains: set[str] = set()
        self._sums: dict[str, tuple[Tensor, int]] = {}
        self._undo: list[Callable[[], None]] = []
        self._inside = False

    def install(self) -> None:
        """Begin to observe."""
        self._undo = [replace(F, name, functools.partial(self._wrap, name)) for name in _NAMES]

    def remove(self) -> None:
        """Put torch's functions back."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> dict[str, float]:
        """Return the mean loss of each function that also trains, and start over."""
        if not self._sums:
            return {}
        sums, self._sums = self._sums, {}
        return {name: float(total) / n for name, (total, n) in sums.items() if name in self._trains}

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def criterion(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or is_tracing() or self._inside:
                return original(*args, **kwargs)
            if has_torch_function((*args, *kwargs.values())):
                return self._as_torch_does(name, original, args, kwargs)
            self._inside = True  # some call each other
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            self._observe(name, result)
            return result

        script_instead(criterion, original)
        return criterion

    def _as_torch_does(
        self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call with torch's function in its place: subclasses and modes look for it by identity."""
        ours = getattr(F, name)
        setattr(F, name, original)
        try:
            return original(*args, **kwargs)
        finally:
            if getattr(F, name) is original and self._undo:
                setattr(F, name, ours)

    def _observe(self, name: str, result: Any) -> None:
        if type(result) is not Tensor or result.dim() or not result.is_floating_point() or inside_func_transform():
            return
        if result.requires_grad:
            self._trains.add(name)
        elif not torch.is_grad_enabled():
            total, n = self._sums.get(name, (None, 0))
            value = result.detach().double()
            self._sums[name] = (value if total is None else total + value.to(total.device), n + 1)
