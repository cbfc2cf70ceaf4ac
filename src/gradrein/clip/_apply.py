"""Scale or limit gradients in place. What cannot be written is refused before anything is written."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import _devices, _kernels, _measure
from .._devices import accumulation_dtype
from .._kernels import foreach as _foreach
from .._measure import shares_memory
from .._torch.ops import has_foreach
from .._torch.storage import sparse_values
from ..errors import UnsupportedGradientError

_FLOAT32 = torch.finfo(torch.float32)


def scale_(grads: list[Tensor], by: float | Tensor, foreach: bool | None = None) -> None:
    """Multiply by a number, by a 0-dim tensor, or each by its own entry of a vector. A factor of 1 writes nothing."""
    backend = _kernels.native(grads, foreach, by)
    if backend is not None and backend.scale_(grads, by):
        return
    taken, rest = _kernels.partition(grads, foreach, by)
    with _writable([grads[i] for i in rest]) as stored:
        if taken:
            scale_([grads[i] for i in taken], _entries(by, taken), foreach)
        together = _use_foreach(stored, foreach)
        _foreach.scale_(stored, _entries(by, rest), foreach=together, in_double=_needs_double(by))


def clamp_(grads: list[Tensor], limit: float | Tensor, foreach: bool | None = None) -> None:
    """Limit every element to [-limit, limit]; of a complex element, its magnitude."""
    backend = _kernels.native(grads, foreach, limit)
    if backend is not None and backend.clamp_(grads, limit):
        return
    taken, rest = _kernels.partition(grads, foreach, limit)
    with _writable([grads[i] for i in rest]) as stored:
        if taken:
            clamp_([grads[i] for i in taken], limit, foreach)
        pairs = [t for i, t in zip(rest, stored, strict=True) if grads[i].is_complex()]
        real = [t for i, t in zip(rest, stored, strict=True) if not grads[i].is_complex()]
        _foreach.clamp_(real, limit, foreach=_use_foreach(real, foreach))
        for t in pairs:
            t.copy_(_shortened(t, torch.as_tensor(limit, dtype=accumulation_dtype(t.device), device=t.device)))


def _shortened(parts: Tensor, limit: Tensor) -> Tensor:
    """Return pairs of real and imaginary parts, in double, at most `limit` long; those with a NaN as they are."""
    exact = parts.to(accumulation_dtype(parts.device))
    top = exact.abs().amax(-1)
    by = torch.where((top > 0) & (top < math.inf), top, 1)
    unit = exact / by.unsqueeze(-1)  # so that the magnitude neither overflows nor vanishes
    # Beside an infinite part a finite one does not count.
    unit = torch.where((top == math.inf).unsqueeze(-1), exact.isinf().to(exact).copysign(exact), unit)
    length = torch.hypot(unit[..., 0], unit[..., 1])
    over = top > limit.to(exact.dtype) / length
    shortened = unit / length.unsqueeze(-1) * limit.to(exact.dtype).unsqueeze(-1)
    return torch.where(over.unsqueeze(-1), shortened, exact)


def scale_slices_(grads: Sequence[Tensor], by: Sequence[Tensor]) -> None:
    """Multiply each gradient by a tensor that broadcasts over it."""
    check_writable(grads)
    kinds: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for g, factor in zip(grads, by, strict=True):
        together = g.shape == factor.shape and not g.is_complex() and not _devices.readable_now([g])
        kinds.setdefault((g.device, g.dtype) if together else None, []).append((g, factor))
    with writing(grads):
        for g, factor in kinds.pop(None, ()):
            g.copy_(g * factor)
        for pairs in kinds.values():
            _foreach.scale_each_([g for g, _ in pairs], [factor for _, factor in pairs])


def zero_(grads: Sequence[Tensor], where: Tensor | None = None) -> None:
    """Set gradients to zero: all of them, or all if the 0-dim bool tensor `where` says so (which is not read)."""
    with _writable(grads) as stored:
        if where is None:
            for t in stored:
                t.zero_()
        else:
            _change_(stored, lambda t: t.masked_fill_(where.to(t.device), 0))


def zero_nonfinite_(grads: Sequence[Tensor]) -> None:
    """Set NaN and infinite elements to zero, and leave the others."""
    with _writable(grads) as stored:
        pairs = [t for g, t in zip(grads, stored, strict=True) if g.is_complex()]
        for t in pairs:
            t.masked_fill_(torch.isfinite(t).all(-1, keepdim=True).logical_not(), 0)
        real = [t for g, t in zip(grads, stored, strict=True) if not g.is_complex()]
        _change_(real, lambda t: t.nan_to_num_(0.0, 0.0, 0.0))


def _change_(tensors: Sequence[Tensor], write: Callable[[Tensor], object]) -> None:
    """Change every element by itself; on a device in few launches, on the CPU without a copy."""
    together = bool(tensors) and not _devices.readable_now(tensors) and _use_foreach(tensors, None)
    _foreach.change_(tensors, write, together=together)


def check_writable(grads: Sequence[Tensor]) -> None:
    """Refuse gradients that cannot be written: of unknown kinds, and whose elements share memory."""
    for g in grads:
        _measure.check_kind(g)
        if g.layout is torch.strided and not g.is_contiguous() and shares_memory(g):
            raise UnsupportedGradientError(
                f"a gradient of shape {tuple(g.shape)} and strides {g.stride()} stores several elements in the same "
                "memory, as an expanded tensor does, so that none can be written by itself. Clone it first."
            )


@contextmanager
def _writable(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield real strided tensors that hold the stored values of each gradient; writing them writes the gradients.

    A pending conjugation or negation commutes with scaling and clamping, and is left in place.
    """
    check_writable(grads)
    with writing(grads):
        yield [_stored(g) for g in grads]


def writing(grads: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which these may be written: inference tensors only in inference mode."""
    inference = not torch.compiler.is_compiling() and any(g.is_inference() for g in grads)
    return torch.inference_mode() if inference else torch.no_grad()


def _entries(by: float | Tensor, where: list[int]) -> float | Tensor:
    return by[where] if isinstance(by, Tensor) and by.dim() == 1 and len(where) < len(by) else by


def _needs_double(by: float | Tensor) -> bool | None:
    """Return whether a factor is outside the normal range of float32; None if it cannot be read."""
    if isinstance(by, float):
        return by != 0 and not _FLOAT32.tiny <= abs(by) <= _FLOAT32.max
    if not _devices.readable_now([by]):
        return None
    outside = (by < _FLOAT32.tiny) | (by > _FLOAT32.max)
    return bool((outside & (by != 0)).any())


def _use_foreach(tensors: Sequence[Tensor], foreach: bool | None) -> bool:
    if foreach is not None:
        return foreach
    return all(type(t) is Tensor and has_foreach(t.device) for t in tensors)


def _stored(g: Tensor) -> Tensor:
    if g.is_sparse and not g.is_coalesced():
        g.copy_(g.detach().coalesce())  # in the same tensor object
    values = sparse_values(g) if g.is_sparse else g.values() if g.layout is not torch.strided else g
    values = _measure.as_stored(values.detach())
    return torch.view_as_real(values) if values.is_complex() else values
