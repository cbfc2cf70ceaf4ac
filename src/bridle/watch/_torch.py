"""Everything the room needs of torch beyond its documented interface, in one place.

Listening to a run means standing where torch can be overheard: optimizer steps through torch's global step hooks
(public), and a few functions that are replaced while someone listens: `torch.autograd.backward` (it is what
`Tensor.backward` calls), `torch.nn.utils.clip_grad_norm_` (the norm before clipping is gone afterwards),
`torch.amp.GradScaler`'s `scale` and `update` (so that the loss is the loss, not its scaled copy), and in one of several
processes `__next__` of what a DataLoader iterates by (how long data is waited for). Each is put back when the last
listener leaves. Checked on torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..clip._parameters import named
from ._pieces import readable
from ._ranks import place

__all__ = ["Listener", "folded_scale", "is_flattened", "listen", "scaled_by", "stop"]


class Listener(Protocol):
    """Someone who is told what the run does."""

    def heard_backward(self, loss: Tensor | None) -> None:
        """A backward pass begins; None where what it starts from is not a number."""

    def heard_backward_end(self) -> None:
        """It is over, one way or another."""

    def heard_loading(self, seconds: float) -> None:
        """A data loader took so long for a batch; only said to one of several processes."""

    def heard_failure(self, error: BaseException) -> None:
        """A backward pass has failed."""

    def heard_clip(self, parameters: list[Tensor], limit: float, norm: Tensor, order: float) -> None:
        """The script has clipped these by their norm, which was this before, and of this order."""

    def heard_scaler_update(self) -> None:
        """A GradScaler is done with this iteration; it may have left the optimizer's step out."""

    def before_step(self, optimizer: torch.optim.Optimizer, again: bool) -> None:
        """Gradients are ready and the optimizer is about to use them; `again` where a closure runs once more."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has moved the weights."""


_listeners: list[Listener] = []
_undo: list[Callable[[], None]] = []
_process = os.getpid()
_unscaled: tuple[Tensor, Tensor] | None = None


def listen(listener: Listener) -> None:
    """Tell this listener what happens from now on."""
    global _process
    if not _listeners:
        _process = os.getpid()
        _install()
    _listeners.append(listener)


def stop(listener: Listener) -> None:
    """Tell it nothing any more."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        while _undo:
            _undo.pop()()


def _told() -> list[Listener]:
    # A forked child (a data loader's worker, say) inherits the hooks and must not write into the parent's record.
    return _listeners if os.getpid() == _process else []


def _install() -> None:
    _undo.append(register_optimizer_step_pre_hook(_before_step).remove)
    _undo.append(register_optimizer_step_post_hook(_after_step).remove)
    _replace(torch.autograd, "backward", _overhear_backward)
    _replace(torch.nn.utils, "clip_grad_norm_", _overhear_clip)
    _replace(torch.nn.utils.clip_grad, "clip_grad_norm_", _overhear_clip)
    # Ours call the engine themselves. Imported here: the package is not whole yet when this file is read.
    for owner in (importlib.import_module("bridle"), importlib.import_module("bridle.autograd")):
        _replace(owner, "backward", _overhear_backward)
    _replace(importlib.import_module("bridle"), "clip_grad_norm_", _overhear_clip)
    _replace(torch.amp.GradScaler, "scale", _overhear_scale)
    _replace(torch.amp.GradScaler, "update", _overhear_update)
    if place() is not None:
        _replace(_BaseDataLoaderIter, "__next__", _overhear_next)


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    ours = functools.wraps(original)(wrap(original))
    setattr(owner, name, ours)

    def put_back() -> None:
        if getattr(owner, name) is ours:  # somebody else's replacement, made since, is theirs to undo
            setattr(owner, name, original)

    _undo.append(put_back)


def _overhear_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if told := _told():
            loss = _number(tensors)
            for listener in told:
                listener.heard_backward(loss)
        try:
            return original(tensors, *args, **kwargs)
        except BaseException as error:
            for listener in told:
                listener.heard_failure(error)
            raise
        finally:
            for listener in told:
                listener.heard_backward_end()

    return backward


def _number(tensors: Any) -> Tensor | None:
    """What backward was called on, as one detached number: the sum where there are several."""
    each = [tensors] if isinstance(tensors, Tensor) else list(tensors) if isinstance(tensors, (list, tuple)) else []
    if not each or not all(isinstance(t, Tensor) and t.numel() == 1 and not t.is_complex() for t in each):
        return None
    known = [readable(_before_scaling(t)) for t in each]
    found = [t.detach().reshape(()) for t in known if t is not None]
    if len(found) < len(each):
        return None
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _before_scaling(tensor: Tensor) -> Tensor:
    return _unscaled[1] if _unscaled is not None and _unscaled[0] is tensor else tensor


def _overhear_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        global _unscaled
        result = original(self, outputs)
        if isinstance(outputs, Tensor) and _told():
            _unscaled = (result, outputs.detach())
        return result

    return scale


def _overhear_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for listener in _told():
            listener.heard_scaler_update()
        return result

    return update


def _overhear_next(original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807  # under this name tracebacks show it
        began = time.perf_counter()
        try:
            return original(self)
        finally:
            for listener in _told():
                listener.heard_loading(time.perf_counter() - began)

    return __next__


def _overhear_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        told = _told()
        if not told:
            return original(parameters, max_norm, *args, **kwargs)
        kept = list(parameters) if isinstance(parameters, Iterator) else parameters
        norm = original(parameters if kept == [] else kept, max_norm, *args, **kwargs)  # of an empty one torch warns
        listed = named(kept)[1]
        order = float(args[0] if args else kwargs.get("norm_type", 2.0))
        for listener in told:
            listener.heard_clip(listed, float(max_norm), norm, order)
        return norm

    return clip_grad_norm_


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    told = _told()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not told or not callable(closure):
        for listener in told:
            listener.before_step(optimizer, False)
        return None
    calls = 0

    # With a closure the gradients of this step are made inside it.
    @functools.wraps(closure)
    def watched() -> Any:
        nonlocal calls
        loss, calls = closure(), calls + 1
        for listener in told:
            listener.before_step(optimizer, calls > 1)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": watched}
    return (args[0], watched, *args[2:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # torch's signature
    for listener in _told():
        listener.after_step(optimizer)


def scaled_by(optimizer: torch.optim.Optimizer) -> float:
    """What the gradients are still multiplied by: a GradScaler leaves that division to a fused optimizer."""
    scale = None if "_bridle_folded" in vars(optimizer) else getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def folded_scale(optimizer: torch.optim.Optimizer) -> float | None:
    """The coefficient that `bridle.clip_(fold_into=...)` has left with this optimizer, if it has."""
    return 1.0 / float(optimizer.grad_scale) if "_bridle_folded" in vars(optimizer) else None  # type: ignore[attr-defined]


def is_flattened(parameter: Tensor) -> bool:
    """Is it a part of what torch's first FullyShardedDataParallel has made one vector of?"""
    return getattr(parameter, "_fsdp_flattened", False)
