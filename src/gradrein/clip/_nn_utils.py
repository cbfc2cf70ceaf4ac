"""The clipping functions of `torch.nn.utils` under their own names and contract, right where torch is not.

`docs/clipping.md` lists every difference.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _devices, _measure, _validate
from .._devices import accumulation_dtype
from .._torch.dtensor import is_dtensor
from ..distributed import PlacementSpec
from ..errors import ArgumentError, GradreinError, NonFiniteGradientError
from . import _all_sharded, _apply
from ._describe import describe
from ._failures import tell_others
from ._gradients import Gradients
from ._locks import one_at_a_time
from ._notify import notify_clip_norm, notify_clip_value
from ._parameters import Target, gradients, live_names, named, present_once, unique, with_gradients
from ._shard_layouts import on_several_ranks, reduced

_EPS = 1e-6  # torch's: part of the contract of its names


@notify_clip_norm
def clip_grad_norm_(
    parameters: Target,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    placement: PlacementSpec | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them, as one vector, is at most `max_norm`.

    DTensors, sharded, replicated or partial on any meshes, count as the full tensors they represent; every rank
    returns the total norm. A plain tensor is assumed to be the same on every rank, unless `placement` says otherwise.

    Args:
        parameters: A tensor, an iterable of tensors, a module, an optimizer, `named_parameters()` or a dict.
        max_norm: The largest norm allowed. A 0-dim tensor is not read from its device. Infinity only measures.
        norm_type: The order of the norm, including `"inf"`.
        error_if_nonfinite: Raise if the norm is NaN or infinite, before anything is scaled.
        foreach: `None` uses the fastest implementation, `False` a plain loop of torch operations; `True` raises on a
            device without multi-tensor operations.
        placement: How plain tensors are distributed over ranks, as in `clip_`.

    Returns:
        The norm before clipping, as a 0-dim tensor: float64 if any gradient is float64, else float32.

    Raises:
        NonFiniteGradientError: (a RuntimeError) The norm is not finite and `error_if_nonfinite` is set.
        ArgumentError: (a ValueError) A negative or NaN `max_norm`, or an order that is not positive.
        RankError: (a RuntimeError) Ranks passed different parameters, or one of them exited or timed out.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradrein.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    See Also:
        [`gradrein.clip_`][], [`gradrein.get_total_norm`][], [`gradrein.per_sample`][]
    """
    try:
        p, limit = _validate.norm_order(norm_type), _validate.threshold(max_norm, "max_norm")
    except ArgumentError as error:
        tell_others(error, lambda call: Gradients.of(*named(parameters), placement, call))
        raise
    options = _Options(limit, p, error_if_nonfinite, foreach)
    if placement is not None:
        names, listed = named(parameters)
        with one_at_a_time(listed):
            return _clip_general(Gradients.of(names, listed, placement, options.describe), options)
    listed, found = with_gradients(parameters)
    if on_several_ranks(listed) or on_several_ranks(found):
        with one_at_a_time(listed):
            return _clip_dtensors(listed, found, options)
    with one_at_a_time(None):
        return _clip_plain(listed, present_once(found), options)


class _Options(NamedTuple):
    max_norm: float | Tensor
    p: float
    error_if_nonfinite: bool
    foreach: bool | None

    def describe(self) -> str:
        return f"clip_grad_norm_(max_norm={describe(self.max_norm)}, error_if_nonfinite={self.error_if_nonfinite})"


def _clip_plain(listed: list[Tensor], grads: list[Tensor], options: _Options) -> Tensor:
    """Clip gradients of this process."""
    norm, value = _total_norm(grads, options.p, options.error_if_nonfinite, options.foreach, listed)
    _scale_down(grads, options.max_norm, value, options.foreach)
    return norm


def _clip_dtensors(listed: list[Tensor], grads: list[Tensor | None], options: _Options) -> Tensor:
    """Clip DTensors, by one number per rank where all of them are sharded on one mesh."""
    where = _all_sharded.read_one_mesh(listed, grads)
    if where is not None:
        norm, value, shards = _all_sharded.total_norm(where, options.p, options.foreach, options.describe())
        if math.isfinite(value) or not options.error_if_nonfinite:  # naming the offenders takes more than a number
            _scale_down(shards, options.max_norm, value, options.foreach)
            return norm
    return _clip_general(Gradients.from_pairs(None, listed, grads, None, options.describe), options)


def _clip_general(grads: Gradients, options: _Options) -> Tensor:
    """Clip gradients with any placement over ranks."""
    norm, value = _total_norm_over_ranks(grads, options.p, options.error_if_nonfinite, options.foreach)
    _scale_down(grads.local, options.max_norm, value, options.foreach)
    return norm


def clip_grad_norm(
    parameters: Target,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The deprecated name of `clip_grad_norm_`.

    Raises:
        NonFiniteGradientError: (a RuntimeError) As in `clip_grad_norm_`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     gradrein.clip_grad_norm([weight], max_norm=1.0)
        tensor(5.)

    See Also:
        [`gradrein.clip_grad_norm_`][]
    """
    warnings.warn("`clip_grad_norm` is deprecated in favor of `clip_grad_norm_`.", category=FutureWarning, stacklevel=2)
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@notify_clip_value
def clip_grad_value_(parameters: Target, clip_value: float | Tensor, foreach: bool | None = None) -> None:
    """Limit every element of every gradient to `[-clip_value, clip_value]`, in place.

    For complex gradients, magnitudes are clipped and phases preserved.

    Args:
        parameters: A tensor, an iterable of tensors, a module, an optimizer, `named_parameters()` or a dict.
        clip_value: The largest magnitude allowed.
        foreach: As in `clip_grad_norm_`.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `clip_value`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> weight.grad = torch.tensor([-7.0, 0.5, 7.0])
        >>> gradrein.clip_grad_value_([weight], 1.0)
        >>> weight.grad
        tensor([-1.0000,  0.5000,  1.0000])

    See Also:
        [`gradrein.clip_`][], [`gradrein.by_value`][], [`gradrein.clip_grad_norm_`][]
    """
    try:
        limit = _validate.threshold(clip_value, "clip_value")
    except GradreinError as error:
        tell_others(error, lambda call: _unmeasured(named(parameters)[1], call))
        raise
    listed, grads = gradients(parameters)
    several_ranks = on_several_ranks(listed) or on_several_ranks(grads)
    with one_at_a_time(listed if several_ranks else None):
        call = lambda: f"clip_grad_value_({describe(limit)})"  # noqa: E731
        sharded = _unmeasured(listed, call, writes_values=True) if several_ranks else None
        grads = grads if sharded is None else sharded.values
        _measure.check_foreach(grads, foreach)
        if isinstance(limit, Tensor) and _devices.readable_now([limit, *grads]):
            limit = _validate.read_threshold(limit, "clip_value")
        if grads:
            _apply.clamp_(grads, limit, foreach)
        if sharded is not None:
            sharded.write_back_partial()


def get_total_norm(
    tensors: Target,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of all tensors as one vector: the first half of `clip_grad_norm_`, for the tensors themselves.

    A tensor that is listed twice counts once, as in `clip_grad_norm_`.

    Args:
        tensors: A tensor, an iterable of tensors, or a dict of them; usually gradients.
        norm_type: The order of the norm, including `"inf"`.
        error_if_nonfinite: Raise if the norm is NaN or infinite.
        foreach: As in `clip_grad_norm_`.

    Returns:
        A 0-dim tensor: float64 if any tensor is float64, else float32.

    Raises:
        NonFiniteGradientError: (a RuntimeError) The norm is not finite and `error_if_nonfinite` is set.
        ArgumentError: (a ValueError) An order that is not positive.

    Examples:
        >>> gradrein.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)

    See Also:
        [`gradrein.clip_grads_with_norm_`][], [`gradrein.clip_grad_norm_`][]
    """
    names, listed = named(tensors)
    try:
        p = _validate.norm_order(norm_type)
    except ArgumentError as error:
        tell_others(error, lambda call: Gradients.from_pairs(names, listed, [*listed], None, call))
        raise
    if on_several_ranks(listed):
        call = f"get_total_norm({error_if_nonfinite=})"
        sharded = Gradients.from_pairs(names, listed, [*listed], None, lambda: call)
        return _total_norm_over_ranks(sharded, p, error_if_nonfinite, foreach)[0]
    return _total_norm(unique(listed), p, error_if_nonfinite, foreach, ())[0]


@notify_clip_norm
def clip_grads_with_norm_(
    parameters: Target, max_norm: float | Tensor, total_norm: float | Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place by a norm that is already known: the second half of `clip_grad_norm_`.

    Args:
        parameters: A tensor, an iterable of tensors, a module, an optimizer, `named_parameters()` or a dict.
        max_norm: The largest norm allowed.
        total_norm: The norm of all gradients, from `get_total_norm`.
        foreach: As in `clip_grad_norm_`.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `max_norm`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradrein.clip_grads_with_norm_([weight], 1.0, gradrein.get_total_norm([weight.grad]))
        >>> weight.grad
        tensor([0.6000, 0.8000])

    See Also:
        [`gradrein.get_total_norm`][], [`gradrein.clip_grad_norm_`][]
    """
    known = _reduced(total_norm)
    try:
        limit, known = _validate.threshold(max_norm, "max_norm"), _validate.total_norm(known)
    except GradreinError as error:
        tell_others(error, lambda call: _unmeasured(named(parameters)[1], call))
        raise
    listed, grads = gradients(parameters)
    several_ranks = on_several_ranks(listed) or on_several_ranks(grads)
    with one_at_a_time(listed if several_ranks else None):
        call = lambda: f"clip_grads_with_norm_({describe(limit)})"  # noqa: E731
        grads = _unmeasured(listed, call).local if several_ranks else grads
        _measure.check_foreach(grads, foreach)
        if isinstance(known, Tensor) and _devices.readable_now([*grads, known]):
            known = float(known)
        _scale_down(grads, limit, known, foreach)


def _unmeasured(listed: list[Tensor], call: Callable[[], str], *, writes_values: bool = False) -> Gradients:
    """Return gradients whose norms are not exchanged. Where some may be partial, ranks compare which are."""
    return Gradients.of(None, listed, None, call, unmeasured=True, writes_values=writes_values)


def _reduced(norm: Any) -> Any:
    """Return a norm that torch's own `get_total_norm` may leave as a partial DTensor, after reducing it."""
    partial = is_dtensor(norm) and any(kind.is_partial() for kind in norm.placements)
    return reduced(norm) if partial else norm


def _total_norm(
    grads: list[Tensor], p: float, error_if_nonfinite: bool, foreach: bool | None, listed: Sequence[Tensor]
) -> tuple[Tensor, float | Tensor]:
    """Return the norm as a tensor, and the norm to compute with: see `_measure.total_norm`."""
    if not grads:
        return torch.tensor(0.0), 0.0
    _measure.check_foreach(grads, foreach)
    norm, value = _measure.total_norm(grads, p, foreach)
    if error_if_nonfinite and not math.isfinite(value):
        raise _nonfinite(_offenders(grads, listed), p, _measure.TOO_LARGE)
    return norm, value


def _total_norm_over_ranks(
    grads: Gradients, p: float, error_if_nonfinite: bool, foreach: bool | None
) -> tuple[Tensor, float | Tensor]:
    """Return the same where gradients lie on several ranks."""
    _measure.check_foreach(grads.local, foreach)
    norm = grads.measure_total(p)
    value = norm.item() if grads.readable_now() else None
    if error_if_nonfinite and not math.isfinite(norm.item() if value is None else value):
        found = zip(grads.names(), grads.count_nonfinite().tolist(), strict=True)
        raise _nonfinite({name: int(n) for name, n in found if n}, p, grads.why_not_finite())
    return norm.to(_measure.result_dtype(grads.local, value)), norm if value is None else value


def _scale_down(grads: list[Tensor], limit: float | Tensor, norm: float | Tensor, foreach: bool | None) -> None:
    """Multiply by `limit / (norm + eps)` where that is below 1. On the CPU nothing is written otherwise."""
    if not grads or (isinstance(limit, float) and limit == math.inf):
        return
    if isinstance(norm, float):
        ceiling = _validate.read_threshold(limit, "max_norm")
        coefficient = ceiling / (norm + _EPS)
        if not coefficient >= 1 and ceiling != math.inf:  # a NaN norm scales too: torch's contract
            _apply.scale_(grads, coefficient, foreach)
        return
    with torch.no_grad():
        exact = norm.to(accumulation_dtype(norm.device))
        factor = _measure.clip_factor(limit, exact, eps=_EPS, if_not_finite=None)
        _apply.scale_(grads, factor, foreach)


def _offenders(grads: list[Tensor], listed: Sequence[Tensor]) -> dict[str, int]:
    owner = {id(q.grad): name for name, q in zip(live_names(listed), listed, strict=True)}
    names = [owner.get(id(g), f"tensor {i}") for i, g in enumerate(grads)]
    return _measure.offenders(names, grads)


def _nonfinite(offenders: dict[str, int], p: float, otherwise: str) -> NonFiniteGradientError:
    found = f"NaN or infinite values: {_measure.list_offenders(offenders)}" if offenders else otherwise
    return NonFiniteGradientError(
        f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
        "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`."
        f"\n{found[0].upper()}{found[1:]}.",
        offenders,
    )
