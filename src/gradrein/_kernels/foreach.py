"""Norm, scale and clamp over many real tensors in torch operations.

Runs on accelerators, for tensor subclasses, under `torch.compile`, and where no native kernel was built. Nothing here
reads a value from a device, so nothing waits for one, and where torch has multi-tensor operations the number of
launches does not grow with that of tensors.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from .._devices import accumulation_dtype
from .._torch.ops import (
    can_scale_half,
    flatten,
    foreach_clamp_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_scale_half_,
    unflatten,
)

HALF = (torch.float16, torch.bfloat16)
LARGEST_ORDER = 4  # powers of what float32 holds stay in the range of float64


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    kinds = defaultdict(list)
    for i, t in enumerate(tensors):
        kinds[t.device, t.dtype].append(i)
    return kinds


def needs_rescaling(device: torch.device, dtype: torch.dtype, p: float) -> bool:
    """Return whether powers of such values may leave the range of the type that they are added up in."""
    if accumulation_dtype(device) != torch.float64:
        return True
    return p not in (1, math.inf) and (dtype in (torch.float64, torch.complex128) or not 1 <= p <= LARGEST_ORDER)


def norms(tensors: Sequence[Tensor], p: float, *, foreach: bool) -> Tensor:
    """Return the p-norm of each tensor, as one vector on the first tensor's device. No tensor may be empty."""
    each: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (device, dtype), where in _by_kind(tensors).items():
        group = [tensors[i] for i in where]
        measure = _scaled_norms if needs_rescaling(device, dtype, p) else _plain_norms
        for i, norm in zip(where, measure(group, p, foreach), strict=True):
            each[i] = norm
    home = tensors[0].device
    return torch.stack([n.to(device=home, dtype=accumulation_dtype(home)) for n in each])


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
    each = []
    for t, top in zip(tensors, tops, strict=True):
        by = torch.where((top > 0) & (top < math.inf), top, 1).to(dtype)
        each.append(torch.linalg.vector_norm(t.to(dtype) / by, p) * by)
    return each


def scale_(tensors: Sequence[Tensor], by: float | Tensor, *, foreach: bool, in_double: bool | None = None) -> None:
    """Multiply every tensor in place: by one number or 0-dim tensor, or by the i-th of a vector.

    Args:
        tensors: Real tensors.
        by: The factor or factors.
        foreach: Use torch's multi-tensor operations.
        in_double: Whether a factor other than 0 is outside the normal range of float32. None: factors cannot be read.
            They are then rounded down to a float32, so that no norm is exceeded.
    """
    each = isinstance(by, Tensor) and by.dim() == 1
    for (device, dtype), where in _by_kind(tensors).items():
        group = [tensors[i] for i in where]
        wide = accumulation_dtype(device)
        factor = by.to(device, wide) if isinstance(by, Tensor) else torch.full((), by, dtype=wide, device=device)
        if dtype != torch.float64 and not in_double:
            factor = factor.to(torch.float32) if in_double is False else _rounded_down(factor)
        factors = [factor[i] for i in where] if each else [factor] * len(where)
        if foreach and in_double is None and not torch.compiler.is_compiling():
            _scale_together_(group, factor if len(where) == len(tensors) or not each else torch.stack(factors))
        elif dtype in HALF or (in_double and dtype != torch.float64):
            for t, f in zip(group, factors, strict=True):
                _scale_once_(t, f)
        elif not foreach:
            for t, f in zip(group, factors, strict=True):
                t.mul_(f)
        else:  # with 0-dim tensors, not floats: faster on the CPU
            foreach_mul_(group, factors if each else factor)


def _rounded_down(factor: Tensor) -> Tensor:
    """Return a factor in float32, not above what it was where float32 has few digits."""
    # Less half of the smallest float32, which only counts beside factors of that size. One launch for both steps.
    return torch.sub(factor, 2.0**-150, out=torch.empty_like(factor, dtype=torch.float32))


def _scale_together_(tensors: list[Tensor], by: Tensor) -> None:
    """Multiply tensors of one kind by a 0-dim tensor or by the entries of a vector, of float32 for half types."""
    if tensors[0].dtype not in HALF:
        foreach_mul_(tensors, per_element(by, tensors) if by.dim() else by)
    elif not by.dim() and can_scale_half(by.device):
        foreach_scale_half_(tensors, by)
    else:
        scale_each_(tensors, per_element(by, tensors) if by.dim() else by)


def scale_each_(tensors: list[Tensor], by: Tensor | list[Tensor]) -> None:
    """Multiply tensors of one kind by a 0-dim tensor, or each by one of its shape; in its type, rounded once."""
    dtype = by.dtype if isinstance(by, Tensor) else by[0].dtype
    if tensors[0].dtype == dtype:
        foreach_mul_(tensors, by)
        return
    values = unflatten(torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device), tensors)
    foreach_copy_(values, tensors)
    foreach_mul_(values, by)
    foreach_copy_(tensors, values)


def per_element(each: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the entry of each tensor for all of its elements, in its shape."""
    return unflatten(torch.cat([own.expand(t.numel()) for own, t in zip(each, tensors, strict=True)]), tensors)


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
        change_(group, partial(_clamp_one_, bound), together=foreach)


def _clamp_one_(bound: Tensor, t: Tensor) -> None:
    t.clamp_(-bound, bound)


def change_(tensors: Sequence[Tensor], write: Callable[[Tensor], object], *, together: bool) -> None:
    """Change every element by itself: tensor by tensor, or end to end and copied back, in few launches."""
    if not together or torch.compiler.is_compiling():
        for t in tensors:
            write(t)
        return
    for where, flat in joined(tensors):
        write(flat)
        if len(where) > 1:
            group = [tensors[i] for i in where]
            foreach_copy_(group, unflatten(flat, group))


def joined(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the tensors of each kind end to end, with their indices; of a single one, the tensor itself."""
    for where in _by_kind(tensors).values():
        yield where, flatten([tensors[i] for i in where]) if len(where) > 1 else tensors[where[0]]
