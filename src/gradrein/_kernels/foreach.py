"""Norm, scale and clamp over many real tensors in torch operations.

Runs on accelerators, for tensor subclasses, under `torch.compile`, and where no native kernel was built. Nothing here
reads a value from a device, so nothing waits for one.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from .._devices import accumulation_dtype
from .._torch.ops import foreach_clamp_, foreach_mul_, foreach_norm


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    kinds = defaultdict(list)
    for i, t in enumerate(tensors):
        kinds[t.device, t.dtype].append(i)
    return kinds


def norms(tensors: Sequence[Tensor], p: float, *, foreach: bool) -> Tensor:
    """Return the p-norm of each tensor, as one vector on the first tensor's device. No tensor may be empty."""
    found: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (device, dtype), where in _by_kind(tensors).items():
        group = [tensors[i] for i in where]
        safe_in_one_pass = p in (1, math.inf) or (p == 2 and dtype != torch.float64)
        measure = _plain_norms if safe_in_one_pass and device.type != "mps" else _scaled_norms
        for i, norm in zip(where, measure(group, p, foreach), strict=True):
            found[i] = norm
    home = tensors[0].device
    return torch.stack([n.to(device=home, dtype=accumulation_dtype(home)) for n in found])


def _plain_norms(tensors: list[Tensor], p: float, foreach: bool) -> Sequence[Tensor]:
    """Accumulate in float64, where no power of a narrower type overflows or vanishes."""
    if foreach:
        return foreach_norm(tensors, p, torch.float64)
    return [torch.linalg.vector_norm(t, p, dtype=torch.float64) for t in tensors]


def _scaled_norms(tensors: list[Tensor], p: float, foreach: bool) -> Sequence[Tensor]:
    """Divide each tensor by its largest value first: for powers that overflow the widest type there is."""
    dtype = accumulation_dtype(tensors[0].device)
    if foreach:
        tops = list(foreach_norm(tensors, math.inf))
    else:
        tops = [torch.linalg.vector_norm(t, math.inf) for t in tensors]
    found = []
    for t, top in zip(tensors, tops, strict=True):
        by = torch.where((top > 0) & (top < math.inf), top, 1).to(dtype)
        found.append(torch.linalg.vector_norm(t.to(dtype) / by, p) * by)
    return found


def scale_(tensors: Sequence[Tensor], by: float | Tensor, *, foreach: bool, in_double: bool | None = None) -> None:
    """Multiply every tensor in place: by one number or 0-dim tensor, or by the i-th of a vector.

    Args:
        tensors: Real tensors.
        by: The factor or factors.
        foreach: Use torch's multi-tensor operations.
        in_double: Whether a factor other than 0 is outside the normal range of float32. None: factors cannot be read.
            They are then rounded down to a float32, so that no norm is exceeded and nothing becomes infinite.
    """
    each = isinstance(by, Tensor) and by.dim() == 1
    for (device, dtype), where in _by_kind(tensors).items():
        group = [tensors[i] for i in where]
        wide = accumulation_dtype(device)
        factor = by.to(device, wide) if isinstance(by, Tensor) else torch.full((), by, dtype=wide, device=device)
        if dtype != torch.float64 and not in_double:
            factor = factor.to(torch.float32) if in_double is False else _rounded_down(factor)
        factors = [factor[i] for i in where] if each else [factor] * len(where)
        if dtype in _HALF or (in_double and dtype != torch.float64):
            for t, f in zip(group, factors, strict=True):
                _scale_once_(t, f)
        elif not foreach:
            for t, f in zip(group, factors, strict=True):
                t.mul_(f)
        else:  # with 0-dim tensors, not floats: faster on the CPU, and no accelerator is asked for a value
            foreach_mul_(group, factors if each else factor)


_HALF = (torch.float16, torch.bfloat16)
_FLOAT32 = torch.finfo(torch.float32)


def _rounded_down(factor: Tensor) -> Tensor:
    near = factor.clamp(max=_FLOAT32.max).to(torch.float32)
    return torch.where(factor < _FLOAT32.tiny, torch.nextafter(near, torch.zeros_like(near)), near)


def _scale_once_(t: Tensor, factor: Tensor) -> None:
    """Multiply in the type of the factor and round once: a 0-dim factor would be rounded to the tensor's type first."""
    flat = t if t.dim() else t.view(1)
    torch.mul(flat, factor.view(1), out=flat)


def clamp_(tensors: Sequence[Tensor], limit: float | Tensor, *, foreach: bool) -> None:
    """Limit every element to [-limit, limit] in place. A limit that the type cannot hold still holds for infinity."""
    for (device, dtype), where in _by_kind(tensors).items():
        group = [tensors[i] for i in where]
        most = torch.finfo(dtype).max
        if not isinstance(limit, Tensor) and foreach:
            foreach_clamp_(group, limit if limit == math.inf else min(limit, most))
            continue
        bound = torch.as_tensor(limit, dtype=accumulation_dtype(device), device=device)
        bound = torch.where(bound < math.inf, bound.clamp(max=most), bound).to(dtype)
        for t in group:
            t.clamp_(-bound, bound)
