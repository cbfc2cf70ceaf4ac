"""Observe training through torch: steps, backward passes, clipping, loss scaling, data loading.

The functions of gradrein notify by themselves (`gradrein._events`). torch's are made to while somebody observes:

- `torch.autograd.backward`, which `Tensor.backward` calls, is replaced.
- The clipping functions of `torch.nn.utils` are closures that turn gradients off around the function itself. That inner
  function is replaced, so a call is seen however the script has imported the name.
- `scale` and `update` of `torch.amp.GradScaler` are replaced: the loss recorded is the one before scaling.
- `__next__` of a DataLoader's iterator is replaced where this is the only process: which samples were delivered
  (`batches.py`).

Steps are seen through torch's global step hooks. Everything is put back when the last observer leaves. Private torch:
the closures.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import _events
from ..._torch.training import DataLoaderIterator
from ...errors import GradreinWarning
from ..format.rank_files import rank_info
from .batches import delivered, forget_indices, remember_index
from .replace import replace
from .shards import replicated_value

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_undo: list[Callable[[], None]] = []
_scaled: tuple[Tensor, Tensor] | None = None


def subscribe(observer: _events.Subscriber) -> None:
    """Notify `observer` from now on, of what torch does as well."""
    if not _undo:
        _install()
    _events.subscribe(observer)


def unsubscribe(observer: _events.Subscriber) -> None:
    """Stop notifying `observer`."""
    _events.unsubscribe(observer)
    if not _events.subscribers:
        while _undo:
            _undo.pop()()


def _install() -> None:
    _undo.append(register_optimizer_step_pre_hook(_before_step).remove)
    _undo.append(replace(torch.autograd, "backward", _events.notify_backward))
    by_norm = _events.notify_clip(_listed, _events.describe_norm)
    by_value = _events.notify_clip(_listed, _events.describe_value)
    for name, wrap in (
        ("clip_grad_norm_", by_norm),
        ("clip_grad_value_", by_value),
        ("_clip_grads_with_norm_", by_norm),
    ):
        _replace_inner(name, wrap)
    _undo.append(replace(torch.amp.GradScaler, "scale", _remember_unscaled))
    _undo.append(replace(torch.amp.GradScaler, "update", _notify_update))
    if rank_info() is None:
        _undo.append(replace(DataLoaderIterator, "_next_index", remember_index))
        _undo.append(replace(DataLoaderIterator, "_reset", forget_indices))
        _undo.append(replace(DataLoaderIterator, "__next__", _notify_batch))


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _replace_inner(name: str, wrap: _Wrap) -> None:
    """Replace the function inside one of torch's clipping functions."""
    function: Any = getattr(clip_grad, name)
    if "func" not in function.__code__.co_freevars:
        warnings.warn(
            f"gradrein does not know the `{name}` of torch {torch.__version__}: where a script has imported it by name "
            "it is not observed, and gradient norms are then recorded after clipping.",
            GradreinWarning,
            stacklevel=5,
        )
        for owner, exported in ((clip_grad, name), (torch.nn.utils, name.lstrip("_"))):
            _undo.append(replace(owner, exported, wrap))
        return
    cell = function.__closure__[function.__code__.co_freevars.index("func")]
    original = cell.cell_contents
    ours = cell.cell_contents = wrap(original)

    def put_back() -> None:
        if cell.cell_contents is ours:
            cell.cell_contents = original

    _undo.append(put_back)


def loss_of(tensors: Any) -> Tensor | None:
    """Return what backward was called on as one detached number, the sum of several; None of anything else."""
    each = [tensors] if isinstance(tensors, Tensor) else list(tensors) if isinstance(tensors, (list, tuple)) else []
    if not each or not all(isinstance(t, Tensor) and t.numel() == 1 and not t.is_complex() for t in each):
        return None
    known = [replicated_value(_before_scaling(t)) for t in each]
    found = [t.detach().reshape(()) for t in known if t is not None]
    if len(found) < len(each):
        return None
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _before_scaling(tensor: Tensor) -> Tensor:
    return _scaled[1] if _scaled is not None and _scaled[0] is tensor else tensor


def _remember_unscaled(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(self: Any, outputs: Any) -> Any:
        global _scaled
        result = original(self, outputs)
        if isinstance(outputs, Tensor) and _events.subscribers:
            _scaled = (result, outputs.detach())
        return result

    return scale


def _notify_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for observer in _events.subscribers:
            observer.on_scaler_update()
        return result

    return update


def _notify_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807  # under this name tracebacks show it
        try:
            return original(self)
        finally:
            batch = delivered(self)
            for observer in _events.subscribers:
                observer.on_batch(batch)

    return __next__


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001  # torch's signature
    for observer in _events.subscribers:
        observer.on_step(optimizer)
