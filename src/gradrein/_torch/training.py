"""Optimizers and data loaders of a training loop."""

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator
from torch.utils.data.dataloader import _DatasetKind as DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as _Workers
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as _Here

__all__ = ["DataLoaderIterator", "StepHook", "dataset_size", "is_stepping"]


def dataset_size(iterator: DataLoaderIterator) -> int | None:
    """Return how many samples a loader draws from by index; None where batches do not come in the order of indices."""
    if type(iterator) not in (_Here, _Workers) or iterator._dataset_kind != DatasetKind.Map:
        return None
    if not getattr(iterator, "_in_order", True):  # workers may overtake each other
        return None
    try:
        return len(iterator._dataset)  # type: ignore[arg-type]  # a dataset by index has a length, or raises
    except Exception:  # whatever the dataset of a script does
        return None


class StepHook:
    """Call a function when the gradients of a step are complete, and another after the step.

    With a closure, gradients are complete each time it has run. A step that calls the step of its base class, which
    torch hooks as well, counts once.

    Args:
        optimizer: Whose steps.
        on_gradients: Called with True where a closure ran again within the same step.
        on_end: Called after the step, with nothing.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, on_gradients: Callable[[bool], None], on_end: Callable[[], None]
    ) -> None:
        self._optimizer = optimizer
        self._on_gradients, self._on_end = on_gradients, on_end
        self._inside, self._nested = False, 0
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Call nothing any more."""
        self._before.remove()
        self._after.remove()

    def move_last(self) -> None:
        """Run after every other hook of the optimizer, such as one that clips."""
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        if self._before.id in hooks:  # not where somebody has cleared them
            hooks.move_to_end(self._before.id)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # `_inside` is also true after a step that raised: only the stack tells.
        if self._inside and _steps_on_stack(optimizer) > 1:
            self._nested += 1
            return None
        self._inside, self._nested = True, 0
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if not callable(closure):
            self._on_gradients(False)
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": self._wrap(closure)}
        return (args[0], self._wrap(closure), *args[2:]), kwargs

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        @functools.wraps(closure)
        def evaluate() -> Any:
            nonlocal calls
            loss = closure()
            calls += 1
            self._on_gradients(calls > 1)
            return loss

        return evaluate

    def _after_step(self, *_: Any) -> None:
        if self._nested:
            self._nested -= 1
            return
        self._inside = False
        self._on_end()


def is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the caller runs inside a step of this optimizer."""
    return _steps_on_stack(optimizer) > 0


def _steps_on_stack(optimizer: torch.optim.Optimizer) -> int:
    code = type(optimizer).step.__code__  # of torch's wrapper, which all optimizers share
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        if frame.f_code is code:
            args = frame.f_locals.get("args", ())
            count += bool(args) and args[0] is optimizer
        frame = frame.f_back
    return count
