"""Apply: scale or limit gradients in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _native
from .._native import reference

__all__ = ["clamp_", "clamp_each_", "clamped", "scale_", "scale_slices_", "zero_", "zero_nonfinite_"]


def scale_(grads: list[Tensor], by: float | Tensor, foreach: bool | None = None) -> None:
    """Multiply by a number, by a 0-dim tensor, or each by its own entry of a vector. A factor of 1 writes nothing."""
    kernels = _native.usable(foreach) if isinstance(by, float) or _plain_vector(by) else None
    if kernels is not None and kernels.scale(grads, by, torch.get_num_threads()):
        _mark_written(grads)
        return
    taken, rest = _native.partition(grads, False if kernels is None else foreach)
    if taken:
        scale_([grads[i] for i in taken], _entries(by, taken), foreach)
    with torch.no_grad():
        plain = [_storage_once(grads[i]) for i in rest]
        factor = torch.as_tensor(_entries(by, rest), dtype=None if isinstance(by, Tensor) else torch.float64)
        reference.scale_(plain, factor, foreach=_use_foreach(plain, foreach))


def clamp_(grads: list[Tensor], limit: float | Tensor, foreach: bool | None = None) -> None:
    """Limit every element to [-limit, limit]; of a complex element, its magnitude."""
    kernels = _native.usable(foreach) if isinstance(limit, float) else None
    if kernels is not None and kernels.clamp(grads, float(limit), torch.get_num_threads()):
        _mark_written(grads)
        return
    taken, rest = _native.partition(grads, False if kernels is None else foreach)
    if taken:
        clamp_([grads[i] for i in taken], limit, foreach)
    with torch.no_grad():
        plain = [_storage_once(_coalesce_(grads[i])) for i in rest]
        real = [t for t in plain if not t.is_complex()]
        reference.clamp_(real, limit, foreach=_use_foreach(real, foreach))
        for t in plain:
            if t.is_complex():
                t.mul_((limit / t.abs()).clamp(max=1).nan_to_num(1.0))


def clamp_each_(grads: Sequence[Tensor], limits: Sequence[Tensor]) -> None:
    """Limit every element by its own entry of a tensor of the gradient's shape."""
    with torch.no_grad():
        for g, held in zip(grads, clamped(grads, limits), strict=True):
            t = _storage_once(g)
            t.copy_(held[tuple(slice(0, size) for size in t.shape)])


def clamped(grads: Sequence[Tensor], limits: Sequence[Tensor]) -> list[Tensor]:
    """New tensors in which every element is limited by its own entry; of a complex element, its magnitude."""
    found = []
    with torch.no_grad():
        for g, limit in zip(grads, limits, strict=True):
            if g.is_complex():
                size = g.abs().to(limit.dtype)
                found.append((g * torch.where(size > limit, limit / size, 1.0)).to(g.dtype))
            else:
                top = limit.to(g.dtype)
                found.append(torch.clamp(g, -top, top))
    return found


def scale_slices_(grads: Sequence[Tensor], by: Sequence[Tensor]) -> None:
    """Multiply each gradient by a tensor that broadcasts over it."""
    with torch.no_grad():
        for g, factor in zip(grads, by, strict=True):
            g.copy_(g * factor)


def zero_(grads: Sequence[Tensor], where: Tensor | None = None) -> None:
    """Set gradients to zero: all of them, or all if the 0-dim bool tensor `where` says so (which is not read)."""
    with torch.no_grad():
        for g in grads:
            t = _storage_once(g)
            t.zero_() if where is None else t.masked_fill_(where.to(t.device), 0)


def zero_nonfinite_(grads: Sequence[Tensor]) -> None:
    """Set NaN and infinite elements to zero, and leave the others."""
    with torch.no_grad():
        for g in grads:
            t = _storage_once(_coalesce_(g))
            t.masked_fill_(torch.isfinite(t).logical_not(), 0)


def _entries(by: float | Tensor, where: list[int]) -> float | Tensor:
    return by[where] if isinstance(by, Tensor) and by.dim() == 1 else by


def _plain_vector(by: object) -> bool:
    return type(by) is Tensor and by.dim() == 1 and by.device.type == "cpu" and by.dtype == torch.float64


def _use_foreach(tensors: Sequence[Tensor], foreach: bool | None) -> bool:
    if foreach is not None:
        return foreach
    return all(type(t) is Tensor and reference.has_foreach(t.device) for t in tensors)


def _coalesce_(g: Tensor) -> Tensor:
    """A sparse gradient with every entry listed once, in the same tensor object."""
    return g.copy_(g.detach().coalesce()) if g.is_sparse and not g.is_coalesced() else g


def _storage_once(g: Tensor) -> Tensor:
    """A dense tensor that holds every stored value of `g` once, so that writing it is writing `g`."""
    if g.is_sparse:
        return g._values()
    if g.layout is not torch.strided:
        return g.values()
    if 0 in g.stride() and g.numel():  # expanded: one stored value stands for many
        sizes = [1 if step == 0 else size for size, step in zip(g.shape, g.stride(), strict=True)]
        return g.as_strided(sizes, g.stride())
    return g


def _mark_written(grads: list[Tensor]) -> None:
    """Tell autograd that C wrote these tensors, as any in-place operation would."""
    try:
        torch.autograd.graph.increment_version(grads)
    except RuntimeError:  # inference tensors have no version to count
        torch.autograd.graph.increment_version([g for g in grads if not g.is_inference()])
