"""Measure: the norms of many gradients, right for every finite value and waiting for no device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import _native
from .._native import reference
from ..errors import UnsupportedDeviceError, UnsupportedGradientError

__all__ = [
    "TOO_LARGE",
    "as_stored",
    "check_foreach",
    "check_kind",
    "check_kinds",
    "count_nonfinite",
    "list_offenders",
    "magnitudes",
    "norm_along",
    "norms",
    "offenders",
    "readable_now",
    "result_dtype",
    "total",
    "total_norm",
]

_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
TOO_LARGE = "the norm of the gradients is larger than any float64, though every value of them is finite"
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def readable_now(grads: Sequence[Tensor]) -> bool:
    """Can values be read without waiting for a device or breaking a compiled graph?"""
    return not torch.compiler.is_compiling() and all(g.is_cpu for g in grads)


def check_foreach(grads: Sequence[Tensor], foreach: bool | None) -> None:
    """Refuse `foreach=True` on a device that has no such operations, before anything is touched."""
    if not foreach:
        return
    for g in grads:
        if not reference.has_foreach(g.device):
            raise UnsupportedDeviceError(
                f"foreach=True was passed, but can't use the foreach API on {g.device.type} tensors. "
                "Pass foreach=None: it picks the fastest way each device has."
            )


def total_norm(grads: list[Tensor], p: float, foreach: bool | None) -> tuple[Tensor, float | None]:
    """The norm of all gradients as a 0-dim tensor, and as a number where that needs no waiting."""
    kernels = _native.usable(foreach)
    found = kernels.norm(grads, p, torch.get_num_threads()) if kernels is not None else None
    if found is not None:
        value, any_double = found
        return torch.tensor(value, dtype=_result_dtype(any_double, value)), value
    with torch.no_grad():
        norm = total(norms(grads, p, foreach), p)
        number = norm.item() if readable_now(grads) else None
        return norm.to(result_dtype(grads, number)), number


def result_dtype(tensors: Sequence[Tensor], value: float | None) -> torch.dtype:
    """The type of the norm of these, where it is this or not known yet."""
    return _result_dtype(any(t.dtype in (torch.float64, torch.complex128) for t in tensors), value)


def _result_dtype(any_double: bool, value: float | None) -> torch.dtype:
    """Never narrower than float32; float64 also where a finite norm is larger than any float32."""
    too_large = value is not None and _LARGEST_FLOAT32 < value < math.inf
    return torch.float64 if any_double or too_large else torch.float32


def norms(grads: list[Tensor], p: float, foreach: bool | None = None) -> Tensor:
    """The p-norm of each gradient: a float64 vector on the first gradient's device."""
    if not grads:
        return torch.zeros(0, dtype=torch.float64)
    if (kernels := _native.usable(foreach)) is not None:
        each = torch.empty(len(grads), dtype=torch.float64)
        if kernels.norm(grads, p, torch.get_num_threads(), each) is not None:
            return each
    taken, rest = _native.partition(grads, foreach)
    with torch.no_grad():
        if not taken:
            return _norms_by_torch(grads, p, foreach)
        parts = [norms([grads[i] for i in taken], p), _norms_by_torch([grads[i] for i in rest], p, foreach)]
        home = grads[0].device
        back = torch.tensor(taken + rest).argsort().to(home)
        return torch.cat([part.to(home) for part in parts])[back]


def _norms_by_torch(grads: list[Tensor], p: float, foreach: bool | None) -> Tensor:
    home = grads[0].device
    plain = [_values(g, p) for g in grads]
    found = {i: torch.zeros((), dtype=reference.wide(home), device=home) for i, t in enumerate(plain) if not t.numel()}
    for together, where in _by_foreach(plain, [i for i in range(len(plain)) if i not in found], foreach):
        found.update(zip(where, reference.norms([plain[i] for i in where], p, foreach=together).to(home), strict=True))
    return torch.stack([found[i] for i in range(len(plain))])


def _by_foreach(tensors: list[Tensor], where: list[int], foreach: bool | None) -> list[tuple[bool, list[int]]]:
    """Indices split by whether torch's multi-tensor operations are used for them."""
    if foreach is not None:
        return [(foreach, where)] if where else []
    able = [i for i in where if type(tensors[i]) is Tensor and reference.has_foreach(tensors[i].device)]
    rest = sorted(set(where) - set(able))
    return [(together, part) for together, part in ((True, able), (False, rest)) if part]


def _values(g: Tensor, p: float) -> Tensor:
    """A dense real tensor with the same p-norm."""
    check_kind(g)
    values = _dense(g)
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()) if p == 2 else magnitudes(values)
    return values


def check_kind(g: Tensor) -> None:
    """Refuse what is not a gradient that can be measured and written."""
    if not g.is_nested and g.dtype in _TYPES:
        return
    kind = "nested" if g.is_nested else str(g.dtype).removeprefix("torch.")
    raise UnsupportedGradientError(
        f"a gradient of shape {'?' if g.is_nested else tuple(g.shape)} is {kind}; gradients are of type float16, "
        "bfloat16, float32, float64, complex64 or complex128, strided or sparse. Convert it first."
    )


def check_kinds(grads: Iterable[Tensor]) -> None:
    """Refuse if any of them is such."""
    for g in grads:
        check_kind(g)


def _dense(g: Tensor) -> Tensor:
    """The values that a gradient stores, up to their sign and conjugation."""
    if g.is_sparse:  # entries may be listed twice until they are coalesced
        return as_stored(g.detach().coalesce().values())
    return as_stored(g.detach().values() if g.layout is not torch.strided else g)


def as_stored(t: Tensor) -> Tensor:
    """The memory of a strided tensor as it is: without a conjugation or negation that torch has put off."""
    if torch.compiler.is_compiling():  # cannot be asked there, and a compiled graph puts nothing off
        return t
    if t.is_conj():
        t = t.conj()
    return torch._neg_view(t) if t.is_neg() else t


def magnitudes(t: Tensor) -> Tensor:
    """The size of every element, in a type that holds it: torch's `abs` of complex64 overflows beyond float32."""
    if not t.is_complex():
        return t.abs()
    parts = torch.view_as_real(t.resolve_conj()).to(reference.wide(t.device))
    return torch.hypot(parts[..., 0], parts[..., 1])


def total(each: Tensor, p: float) -> Tensor:
    """The p-norm of all gradients from the p-norm of each: of a vector, a 0-dim tensor; of a matrix, by column."""
    if not len(each):
        return each.sum(0)
    by = _usable_scale(each.amax(0))
    norm: Tensor = torch.linalg.vector_norm(each / by, p, dim=0)
    return norm * by


def _usable_scale(top: Tensor) -> Tensor:
    """What to divide by so that no power overflows or vanishes: the largest value, or 1 where that says nothing."""
    return torch.where((top > 0) & (top < math.inf), top, 1)


def norm_along(t: Tensor, axes: int | Sequence[int] | None) -> Tensor:
    """The 2-norm of slices along `axes`, with those dimensions kept at size 1: right for every finite value."""
    dims = axes if axes is None or isinstance(axes, int) else tuple(axes)
    sizes = magnitudes(t).to(reference.wide(t.device))
    by = _usable_scale(sizes.amax(dim=() if dims is None else dims, keepdim=True)) if t.numel() else 1.0
    norm: Tensor = torch.linalg.vector_norm(sizes / by, 2, dim=dims, keepdim=True)
    return norm * by


def count_nonfinite(grads: Sequence[Tensor]) -> Tensor:
    """How many values of each gradient are NaN or infinite: a vector on the first gradient's device."""
    if not grads:
        return torch.zeros(0)
    with torch.no_grad():
        counts = [torch.isfinite(_dense(g)).logical_not().sum() for g in grads]
        return torch.stack([n.to(grads[0].device) for n in counts])


def offenders(names: Sequence[str], grads: Sequence[Tensor]) -> dict[str, int]:
    """The gradients that hold NaN or infinite values, by name, with how many. Reads from the device."""
    return {name: n for name, n in zip(names, count_nonfinite(grads).tolist(), strict=True) if n}


def list_offenders(found: dict[str, int], at_most: int = 20) -> str:
    """Offenders in words."""
    listed = [f"{name} ({n} value{'s' if n > 1 else ''})" for name, n in list(found.items())[:at_most]]
    more = [f"and {len(found) - at_most} more"] if len(found) > at_most else []
    return ", ".join(listed + more)
