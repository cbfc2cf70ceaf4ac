"""Notify subscribers of backward passes, of clipping, and of what else `gradrein.watch` observes.

The functions of gradrein that start a backward pass or change gradients are decorated with what is here, and
`gradrein.watch` subscribes. That works however a function was imported. Without a subscriber a decorated function costs
one more Python call.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ._torch.engine import engine_local

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ClipEvent:
    """What a clipping function did. Nothing is read from a device.

    Attributes:
        max_norm: The threshold, where it is one fixed number for all gradients.
        norm: Return the 2-norm of all gradients before, over all ranks; None where it is not known.
        factor: Return what all gradients were multiplied by, NaN or None where there is no such number.
    """

    max_norm: float | None
    norm: Callable[[], Tensor | None]
    factor: Callable[[], Tensor | None]


class Subscriber:
    """Receives notifications. A subclass has methods for those that it handles."""

    def on_backward(self, tensors: Any) -> None:
        """Handle the start of a backward pass from `tensors`."""

    def on_backward_end(self, error: BaseException | None) -> None:
        """Handle its end; `error` is what it raised."""

    def before_clip(self, parameters: list[Tensor]) -> None:
        """Handle gradients that are about to be clipped."""

    def after_clip(self, parameters: list[Tensor], event: ClipEvent) -> None:
        """Handle gradients that have been clipped. Not called where nothing could have changed."""

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle a step that is about to begin, before any other hook of it."""

    def on_batch(self, batch: Any) -> None:
        """Handle a batch that a data loader delivered, None where its indices are unknown; only in a single process."""

    def on_scaler_update(self) -> None:
        """Handle the end of an iteration of a GradScaler, which may have left the optimizer's step out."""


_EPS = 1e-6  # of torch's clip_grad_norm_
subscribers: list[Subscriber] = []
if hasattr(os, "register_at_fork"):  # a worker of a data loader must not write into the record of its parent
    os.register_at_fork(after_in_child=subscribers.clear)


def _running() -> Any:
    """Return what this thread is in the middle of; the same for what the engine runs in threads of its own."""
    return engine_local("gradrein events", lambda: SimpleNamespace(backward=False, clipping=False))


def subscribe(subscriber: Subscriber) -> None:
    """Notify `subscriber` from now on."""
    subscribers.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop notifying `subscriber`."""
    if subscriber in subscribers:
        subscribers.remove(subscriber)


def notify_backward(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose first argument is what a backward pass starts from.

    A backward pass inside another, as of a checkpoint, does not notify.
    """

    @functools.wraps(function)
    def backward(*args: P.args, **kwargs: P.kwargs) -> R:
        if not subscribers or torch.compiler.is_compiling() or (running := _running()).backward:
            return function(*args, **kwargs)
        notified = list(subscribers)
        for subscriber in notified:
            subscriber.on_backward(args[0] if args else kwargs.get("tensors"))
        raised: BaseException | None = None
        running.backward = True
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raised = error
            raise
        finally:
            running.backward = False
            for subscriber in notified:
                subscriber.on_backward_end(raised)
            raised = None  # an error must not keep its own frame alive

    return backward


def notify_clip(
    parameters_of: Callable[[Any], list[Tensor]], describe: Callable[[dict[str, Any], Any], ClipEvent | None]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that changes the gradients of its first argument.

    Of functions that call each other only the outermost notifies.

    Args:
        parameters_of: Return the parameters behind the first argument. May raise: the function then refuses it itself.
        describe: Return what was done from the arguments by name and the result; None where nothing was.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def clip(*args: P.args, **kwargs: P.kwargs) -> R:
            if not subscribers or torch.compiler.is_compiling() or _running().clipping:
                return function(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                first = next(iter(bound.arguments))
                target = bound.arguments[first]
                listed = list(target) if isinstance(target, Iterator) else target
                parameters = parameters_of(listed)
            except Exception:  # wrong arguments: the function says so
                return function(*args, **kwargs)
            if parameters:  # of an empty iterator the function warns
                bound.arguments[first] = listed
            return _notified(function, bound, parameters, describe)

        return clip

    return decorate


def _notified(
    function: Callable[..., R],
    bound: inspect.BoundArguments,
    parameters: list[Tensor],
    describe: Callable[[dict[str, Any], Any], ClipEvent | None],
) -> R:
    notified = list(subscribers)
    for subscriber in notified:
        subscriber.before_clip(parameters)
    running = _running()
    running.clipping = True
    try:
        result = function(*bound.args, **bound.kwargs)
    finally:
        running.clipping = False
    if (event := describe(bound.arguments, result)) is not None:
        for subscriber in notified:
            subscriber.after_clip(parameters, event)
    return result


def describe_norm(arguments: dict[str, Any], result: Any) -> ClipEvent | None:
    """Describe a call of `clip_grad_norm_` or `clip_grads_with_norm_`, torch's or ours."""
    max_norm = float(arguments["max_norm"])
    if math.isinf(max_norm):  # only measures
        return None
    total = arguments.get("total_norm", result)
    is_two_norm = float(arguments.get("norm_type", "nan")) == 2.0  # not known of `clip_grads_with_norm_`

    def factor() -> Tensor | None:
        if (norm := _local(total)) is None:
            return None
        return (max_norm / (norm + _EPS)).clamp(max=1.0).where(norm.isfinite(), math.nan)

    return ClipEvent(max_norm, lambda: _local(total) if is_two_norm else None, factor)


def describe_value(arguments: dict[str, Any], result: Any) -> ClipEvent:  # noqa: ARG001  # as `describe_norm`
    """Describe a call of `clip_grad_value_`, torch's or ours."""
    return ClipEvent(None, lambda: None, lambda: None)


def _local(total: Any) -> Tensor | None:
    """Return a norm as this rank holds it; None of a DTensor that the ranks have not yet reduced."""
    placements = getattr(total, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        return None
    return torch.as_tensor(total.to_local() if placements else total)
