"""Measure: the norms of many gradients, right for every finite value and waiting for no device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _native
from .._native import reference
from ..errors import UnsupportedDeviceError, UnsupportedGradientError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_foreach", "count_nonfinite", "norms", "readable_now", "total", "total_on_host"]

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def readable_now(grads: Sequence[Tensor]) -> bool:
    """Can values be read without waiting for a device or breaking a compiled graph?"""
    return not torch.compiler.is_compiling() and all(g.device.type == "cpu" for g in grads)


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


def total_on_host(grads: list[Tensor], p: float, foreach: bool | None) -> tuple[float, torch.dtype] | None:
    """The norm of all gradients as a number, with the type to return it in; None where C cannot measure them all."""
    kernels = _native.usable(foreach)
    found = kernels and kernels.norm(grads, p, torch.get_num_threads())
    if found is None:
        return None
    norm, any_double = found
    # A finite norm is returned as one, even where it is larger than any float32.
    return norm, torch.float64 if any_double or _LARGEST_FLOAT32 < norm < math.inf else torch.float32


def norms(grads: list[Tensor], p: float, foreach: bool | None = None) -> Tensor:
    """The p-norm of each gradient: a float64 vector on the first gradient's device."""
    if (kernels := _native.usable(foreach)) is not None:
        each = torch.empty(len(grads), dtype=torch.float64)
        if kernels.norm(grads, p, torch.get_num_threads(), each) is not None:
            return each
    taken, rest = _native.partition(grads, foreach)
    with torch.no_grad():
        parts = [norms([grads[i] for i in taken], p)] if taken else []
        parts += [_norms_by_torch([grads[i] for i in rest], p, foreach)] if rest else []
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
    if g.is_sparse:  # entries may be listed twice until they are coalesced
        g = g.detach().coalesce().values()
    elif g.layout is not torch.strided and not g.is_nested:
        g = g.detach().values()
    if g.is_complex():
        return torch.view_as_real(g.resolve_conj()) if p == 2 else g.abs()
    if g.is_nested or not g.is_floating_point():
        kind = "nested" if g.is_nested else str(g.dtype).removeprefix("torch.")
        raise UnsupportedGradientError(
            f"a gradient of shape {'?' if g.is_nested else tuple(g.shape)} is {kind}; gradients are floating-point "
            "or complex, strided or sparse. Convert it first."
        )
    return g


def total(each: Tensor, p: float) -> Tensor:
    """The p-norm of all gradients from the p-norm of each, as a 0-dim tensor on the same device."""
    if p in (1, math.inf):
        return torch.linalg.vector_norm(each, p)
    top = each.amax()
    by = torch.where((top > 0) & (top < math.inf), top, 1)
    return torch.linalg.vector_norm(each / by, p) * by


def count_nonfinite(grads: Sequence[Tensor]) -> list[int]:
    """How many values of each gradient are NaN or infinite. Reads from the device."""
    not_finite: Callable[[Tensor], Tensor] = lambda g: torch.isfinite(_values(g, 1.0)).logical_not().sum()
    with torch.no_grad():
        return torch.stack([not_finite(g).cpu() for g in grads]).tolist() if grads else []
