"""Norms of many gradients, right for every finite value and without waiting for a device."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from . import _devices, _kernels
from ._devices import accumulation_dtype
from ._kernels import foreach as _foreach
from ._torch.ops import has_foreach, unflatten
from ._torch.storage import undo_negation
from .errors import CallArgumentError, UnsupportedGradientError

_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_DOUBLE = frozenset({torch.float64, torch.complex128})
TOO_LARGE = "the norm of the gradients is larger than any float64, though every value of them is finite"
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def check_foreach(grads: Sequence[Tensor], foreach: bool | None) -> None:
    """Refuse `foreach=True` on a device that has no such operations, before anything is touched."""
    if not foreach:
        return
    for g in grads:
        if not has_foreach(g.device):
            raise CallArgumentError(
                f"foreach=True was passed, but can't use the foreach API on {g.device.type} tensors. "
                "Pass foreach=None: it picks the fastest way each device has."
            )


def total_norm(grads: list[Tensor], p: float, foreach: bool | None) -> tuple[Tensor, float | Tensor]:
    """Return the norm of all gradients as a 0-dim tensor of the dtype to return, and the norm to compute with.

    The latter is a number where that needs no waiting, and otherwise in float64 where the device has that: float32 may
    hold every gradient and not their norm.
    """
    backend = _kernels.native(grads, foreach)
    measured = backend.total_norm(grads, p) if backend is not None else None
    if measured is not None:
        value, double = measured
        return torch.tensor(value, dtype=dtype_of_norm(double, value), device=grads[0].device), value
    with torch.no_grad():
        norm = total(norms(grads, p, foreach), p, rescale=needs_rescaling(grads, p))
        number = norm.item() if _devices.readable_now(grads) else None
        return norm.to(result_dtype(grads, number)), norm if number is None else number


def needs_rescaling(tensors: Sequence[Tensor], p: float) -> bool:
    """Return whether powers of norms of such tensors may leave the range of the type that they are added up in."""
    return any(_foreach.needs_rescaling(*kind, p) for kind in {(t.device, t.dtype) for t in tensors})


def any_double(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is of double precision."""
    return not {t.dtype for t in tensors}.isdisjoint(_DOUBLE)


def result_dtype(tensors: Sequence[Tensor], value: float | None) -> torch.dtype:
    """Return the dtype for the norm of these tensors; `value` is the norm, where it is known."""
    return dtype_of_norm(any_double(tensors), value)


def dtype_of_norm(double: bool, value: float | None) -> torch.dtype:
    """Return float32, or float64 where that is among gradients or a finite norm is larger than any float32."""
    too_large = value is not None and _LARGEST_FLOAT32 < value < math.inf
    return torch.float64 if double or too_large else torch.float32


def clip_factor(limit: float | Tensor, norm: Tensor, *, eps: float = 0.0, if_not_finite: float | None = 1.0) -> Tensor:
    """Return the factor that reduces a norm to a limit: exactly 1 below it, and 1 if the norm is not finite.

    Args:
        limit: The largest norm allowed, a number or a tensor.
        norm: The norms.
        eps: What is added to the norm; torch's functions have 1e-6.
        if_not_finite: The factor of a norm that is NaN or infinite; None for what the division gives.

    Examples:
        >>> gradrein.policies.clip_factor(1.0, torch.tensor([0.5, 4.0]))
        tensor([1.0000, 0.2500])

    See Also:
        [`gradrein.policies.Scale`][], [`gradrein.policies.Policy`][]
    """
    ceiling = limit.to(norm) if isinstance(limit, Tensor) else limit
    if if_not_finite == 1.0:
        # Not a number over a tensor: torch makes that a reciprocal, which a tiny norm makes infinite. And times 0 a
        # norm that is not finite makes the limit NaN, which then becomes 1: no further operation finds out.
        known = torch.add(ceiling, norm, alpha=0) if isinstance(ceiling, Tensor) else torch.rsub(norm, ceiling, alpha=0)
        return _normal(known / norm).clamp_(max=1.0).nan_to_num_(1.0)
    top = ceiling if isinstance(ceiling, Tensor) else norm.new_full((), ceiling)
    factor = _normal(top / (norm + eps if eps else norm))
    if if_not_finite is None:
        factor = factor.clamp(max=1.0)
        return factor.masked_fill(top == math.inf, 1.0) if isinstance(limit, Tensor) or limit == math.inf else factor
    factor = factor.masked_fill((norm > top).logical_not(), 1.0)
    return factor.masked_fill((norm < math.inf).logical_not(), if_not_finite)


def clip_factor_or_one(limit: float | Tensor, norm: Tensor) -> Tensor:
    """Return the same of norms that are NaN where they are not finite, and the factor 1 there: in fewer operations."""
    ceiling = limit.to(norm) if isinstance(limit, Tensor) else limit
    return _normal(ceiling / norm).clamp_(max=1.0).nan_to_num_(1.0)


def _normal(factor: Tensor) -> Tensor:
    """Round a subnormal factor down, so that the norm after clipping does not exceed the limit."""
    if not _devices.readable_now([factor]):  # rounded to nearest, where it would cost launches at every step
        return factor
    tiny = torch.finfo(factor.dtype).tiny
    return torch.where(factor < tiny, torch.nextafter(factor, torch.zeros_like(factor)), factor)


def norms(grads: list[Tensor], p: float, foreach: bool | None = None) -> Tensor:
    """Return the p-norm of each gradient: a float64 vector on the first gradient's device."""
    if not grads:
        return torch.zeros(0, dtype=torch.float64)
    backend = _kernels.native(grads, foreach)
    if backend is not None and (each := backend.norms(grads, p)) is not None:
        return each
    _refuse_some_meta(grads)
    taken, rest = _kernels.partition(grads, foreach)
    with torch.no_grad():
        if not taken:
            return _norms_by_torch(grads, p, foreach)
        parts = [norms([grads[i] for i in taken], p), _norms_by_torch([grads[i] for i in rest], p, foreach)]
        home = grads[0].device
        back = torch.tensor(taken + rest, device=home).argsort()
        return torch.cat([part.to(home) for part in parts])[back]


def _refuse_some_meta(grads: Sequence[Tensor]) -> None:
    """Refuse gradients of which only some have values: their norm is neither known nor unknown."""
    without = [g.is_meta for g in grads]
    if any(without) and not all(without):
        raise UnsupportedGradientError(
            f"{sum(without)} of {len(grads)} gradients are on the meta device, which has shapes and no values, and "
            f"number {without.index(True)} is the first of them; the others have values. Clip them in separate calls."
        )


def _norms_by_torch(grads: list[Tensor], p: float, foreach: bool | None) -> Tensor:
    home = grads[0].device
    values = [_values(g, p) for g in grads]
    held = [i for i, t in enumerate(values) if t.numel()]
    sets = _by_foreach(values, held, foreach)
    if len(sets) == 1 and len(held) == len(values):
        return _foreach.norms(values, p, foreach=sets[0][0])
    each = [torch.zeros((), dtype=accumulation_dtype(home), device=home)] * len(values)
    for together, where in sets:
        norms = _foreach.norms([values[i] for i in where], p, foreach=together).to(home)
        for i, norm in zip(where, norms, strict=True):
            each[i] = norm
    return torch.stack(each)


def _by_foreach(tensors: list[Tensor], where: list[int], foreach: bool | None) -> list[tuple[bool, list[int]]]:
    """Split indices by whether torch's multi-tensor operations are used for them."""
    if foreach is not None:
        return [(foreach, where)] if where else []
    able = [i for i in where if type(tensors[i]) is Tensor and has_foreach(tensors[i].device)]
    rest = sorted(set(where) - set(able))
    return [(together, part) for together, part in ((True, able), (False, rest)) if part]


def _values(g: Tensor, p: float) -> Tensor:
    """Return a dense real tensor with the same p-norm."""
    check_kind(g)
    values = _dense(g)
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj()) if p == 2 else magnitudes(values)
    return values


def check_kind(g: Tensor) -> None:
    """Refuse what is not a gradient that can be measured and written."""
    is_masked = isinstance(g, MaskedTensor)
    if not g.is_nested and not is_masked and g.dtype in _TYPES:
        return
    kind = "nested" if g.is_nested else "masked" if is_masked else str(g.dtype).removeprefix("torch.")
    raise UnsupportedGradientError(
        f"a gradient of shape {'?' if g.is_nested else tuple(g.shape)} is {kind}; gradients are of type float16, "
        "bfloat16, float32, float64, complex64 or complex128, strided or sparse. Convert it first."
    )


def _dense(g: Tensor) -> Tensor:
    """Return the values that a gradient stores, up to their sign and conjugation."""
    if g.is_sparse:  # entries may be listed twice until they are coalesced
        return as_stored(g.detach().coalesce().values())
    return as_stored(g.detach().values() if g.layout is not torch.strided else g)


def as_stored(t: Tensor) -> Tensor:
    """Return the memory of a strided tensor as stored, without a pending conjugation or negation."""
    if torch.compiler.is_compiling():  # not traceable, and a compiled graph has nothing pending
        return t
    if t.is_conj():
        t = t.conj()
    return undo_negation(t)


def magnitudes(t: Tensor) -> Tensor:
    """Return the magnitude of every element, in float64 for complex ones: torch's `abs` of complex64 overflows."""
    if not t.is_complex():
        return t.abs()
    parts = torch.view_as_real(t.resolve_conj()).to(accumulation_dtype(t.device))
    return torch.hypot(parts[..., 0], parts[..., 1])


def total(each: Tensor, p: float, *, rescale: bool = True) -> Tensor:
    """Return the p-norm of p-norms: of a vector, a 0-dim tensor; of a matrix, by column.

    Args:
        each: The norms.
        p: The order.
        rescale: Take powers relative to the largest norm: for those whose powers may leave the range of the type.
    """
    if len(each) < 2:  # the norm of nothing, or the only one
        return each.sum(0)
    if not rescale:
        plain: Tensor = torch.linalg.vector_norm(each, p, dim=0)
        return plain
    by = safe_divisor(each.amax(0))
    norm: Tensor = torch.linalg.vector_norm(each / by, p, dim=0)
    return norm * by


def safe_divisor(top: Tensor) -> Tensor:
    """Return a divisor with which no power overflows or vanishes: the largest value, or 1 if 0 or infinite."""
    return torch.where((top > 0) & (top < math.inf), top, 1)


def norm_along(t: Tensor, axes: int | Sequence[int] | None) -> Tensor:
    """Return the 2-norm of slices along `axes`, with those dimensions kept at size 1: right for every finite value.

    Without any axis each element is a slice; None stands for all axes.
    """
    dims = axes if axes is None or isinstance(axes, int) else tuple(axes)
    if dims != () and not t.is_complex() and not _foreach.needs_rescaling(t.device, t.dtype, 2.0):
        plain: Tensor = torch.linalg.vector_norm(t, 2, dim=dims, keepdim=True, dtype=torch.float64)
        return plain
    sizes = magnitudes(t).to(accumulation_dtype(t.device))
    if dims == ():  # for torch that means all
        return sizes
    by = safe_divisor(sizes.amax(dim=() if dims is None else dims, keepdim=True)) if t.numel() else 1.0
    norm: Tensor = torch.linalg.vector_norm(sizes / by, 2, dim=dims, keepdim=True)
    return norm * by


def count_nonfinite(grads: Sequence[Tensor]) -> Tensor:
    """Return how many values of each gradient are NaN or infinite: a vector on the first gradient's device."""
    if not grads:
        return torch.zeros(0)
    with torch.no_grad():
        counts = [nonfinite(g).sum() for g in grads]
        return torch.stack([n.to(grads[0].device) for n in counts])


def nonfinite(grad: Tensor) -> Tensor:
    """Return which of the values that a gradient stores are NaN or infinite."""
    return torch.isfinite(_dense(grad)).logical_not()


def count_nonfinite_later(grads: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a function that counts the values that are NaN or infinite now: few launches until it is called."""
    with torch.no_grad():
        stored = [_dense(g) for g in grads]
        marks = [(where, (flat - flat) != 0) for where, flat in _foreach.joined(stored)]
        each: dict[int, Tensor] = {}
        for where, flat in marks:
            each.update(zip(where, unflatten(flat, [stored[i] for i in where]), strict=True))
    return lambda: torch.stack([each[i].sum().to(stored[0].device) for i in range(len(stored))])


def list_offenders(offenders: dict[str, int], at_most: int = 20) -> str:
    """Describe offenders."""
    listed = [f"{name} ({n} value{'s' if n > 1 else ''})" for name, n in list(offenders.items())[:at_most]]
    more = [f"and {len(offenders) - at_most} more"] if len(offenders) > at_most else []
    return ", ".join(listed + more)


def shares_memory(t: Tensor) -> bool:
    """Return whether elements of a strided tensor may share memory, as in an expanded one."""
    reach = 0
    if not t.numel():
        return False
    for step, size in sorted((step, size) for step, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
