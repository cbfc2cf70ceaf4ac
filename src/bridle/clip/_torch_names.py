"""The clipping functions of `torch.nn.utils` under their own names and contract, right where torch is not.

`docs/clipping.md` lists every difference.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._native import reference
from ..errors import NonFiniteGradientError
from . import _apply, _check, _measure, _ranks, _sharded
from ._fingerprint import setting
from ._gradients import Gradients
from ._groups import Groups
from ._notify import notify_clip_norm, notify_clip_value
from ._target import Target, gradients, live_names, named, unique
from ._turn import turn

__all__ = ["clip_grad_norm", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]

_EPS = 1e-6  # torch's: part of the contract of its names


@notify_clip_norm
def clip_grad_norm_(
    parameters: Target,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    groups: Groups | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them, as one vector, is at most `max_norm`.

    DTensors, sharded, replicated or partial on whatever meshes, count as the tensors they are pieces of; every rank
    returns the norm of all. A plain tensor is taken to be the same on every rank, unless `groups` says otherwise.

    Args:
        parameters: a tensor, an iterable of tensors, a module, an optimizer, `named_parameters()` or a dict.
        max_norm: the largest norm allowed; a 0-dim tensor is not read from its device; infinite only measures.
        norm_type: the order of the norm, `"inf"` included.
        error_if_nonfinite: raise where the norm is NaN or infinite, before anything is scaled.
        foreach: `None` takes the fastest way there is, `False` a plain loop of torch operations, `True` refuses a
            device without multi-tensor operations.
        groups: what tensors cannot say about other ranks, as in `clip_`.

    Returns:
        The norm before clipping, as a 0-dim tensor: float64 if any gradient is, else float32.

    Raises:
        NonFiniteGradientError: (a RuntimeError) the norm is not finite and `error_if_nonfinite` is set.
        ArgumentError: (a ValueError) a negative or NaN `max_norm`, or an order that is not positive.
        RankError: (a RuntimeError) ranks that passed different parameters, or one that is gone or late.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> bridle.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    p, limit = _check.order(norm_type), _check.threshold(max_norm, "max_norm")

    def call() -> str:
        return f"clip_grad_norm_(max_norm={setting(limit)}, {error_if_nonfinite=})"

    if groups is not None:
        names, listed = named(parameters)
        with turn(listed):
            spread = Gradients.of(names, listed, groups, call)
            return _clip_spread(spread, limit, p, error_if_nonfinite, foreach)
    listed, grads = gradients(parameters)
    if _ranks.spans(listed) or _ranks.spans(grads):
        with turn(listed):
            return _clip_dtensors(listed, grads, limit, p, error_if_nonfinite, foreach, call)
    with turn(None):
        norm, value = _total(grads, p, error_if_nonfinite, foreach, listed)
        _scale_down(grads, limit, norm if value is None else value, foreach)
        return norm


def _clip_dtensors(
    listed: list[Tensor],
    grads: list[Tensor],
    limit: float | Tensor,
    p: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    call: Callable[[], str],
) -> Tensor:
    every: list[Tensor | None] = [q.grad for q in listed] if len(grads) < len(listed) else [*grads]
    cut = _sharded.pieces(listed, every)
    if cut is not None:
        norm = _sharded.total(listed, *cut, p, foreach, call())
        if norm.isfinite() or not error_if_nonfinite:  # who is to blame takes more than a number
            _scale_down(cut[0], limit, norm.item(), foreach)
            return norm
    return _clip_spread(Gradients.listed(None, listed, every, None, call), limit, p, error_if_nonfinite, foreach)


def _clip_spread(
    grads: Gradients, limit: float | Tensor, p: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    norm, value = _total_over_ranks(grads, p, error_if_nonfinite, foreach)
    _scale_down(grads.local, limit, norm if value is None else value, foreach)
    return norm


def clip_grad_norm(
    parameters: Target,
    max_norm: float | Tensor,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The deprecated name of `clip_grad_norm_`."""
    warnings.warn("`clip_grad_norm` is deprecated in favor of `clip_grad_norm_`.", category=FutureWarning, stacklevel=2)
    return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@notify_clip_value
def clip_grad_value_(parameters: Target, clip_value: float | Tensor, foreach: bool | None = None) -> None:
    """Limit every element of every gradient to `[-clip_value, clip_value]`, in place.

    Of a complex gradient the magnitude of each element is limited, and its phase kept.

    Args:
        parameters: a tensor, an iterable of tensors, a module, an optimizer, `named_parameters()` or a dict.
        clip_value: the largest magnitude allowed.
        foreach: as in `clip_grad_norm_`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> weight.grad = torch.tensor([-7.0, 0.5, 7.0])
        >>> bridle.clip_grad_value_([weight], 1.0)
        >>> weight.grad
        tensor([-1.0000,  0.5000,  1.0000])
    """
    limit = _check.threshold(clip_value, "clip_value")
    listed, grads = gradients(parameters)
    spans = _ranks.spans(grads)
    with turn(listed if spans else None):
        spread = Gradients.of(None, listed) if spans else None
        grads = grads if spread is None else spread.values
        _measure.check_foreach(grads, foreach)
        if isinstance(limit, Tensor) and _measure.readable_now([limit, *grads]):
            limit = _check.on_host(limit, "clip_value")
        if grads:
            _apply.clamp_(grads, limit, foreach)
        if spread is not None:
            spread.settle()


def get_total_norm(
    tensors: Target,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all tensors as one vector: the first half of `clip_grad_norm_`, over the tensors themselves.

    A tensor that is listed twice counts once, as it does there.

    Args:
        tensors: a tensor, an iterable of tensors, or a dict of them; usually gradients.
        norm_type: the order of the norm, `"inf"` included.
        error_if_nonfinite: raise where the norm is NaN or infinite.
        foreach: as in `clip_grad_norm_`.

    Returns:
        A 0-dim tensor: float64 if any tensor is, else float32.

    Example:
        >>> bridle.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    p = _check.order(norm_type)
    names, listed = named(tensors)
    if _ranks.spans(listed):
        call = f"get_total_norm({error_if_nonfinite=})"
        spread = Gradients.listed(names, listed, [*listed], None, lambda: call)
        return _total_over_ranks(spread, p, error_if_nonfinite, foreach)[0]
    return _total(unique(listed), p, error_if_nonfinite, foreach, ())[0]


@notify_clip_norm
def clip_grads_with_norm_(
    parameters: Target, max_norm: float | Tensor, total_norm: float | Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients in place by a norm that is known already: the second half of `clip_grad_norm_`.

    Args:
        parameters: a tensor, an iterable of tensors, a module, an optimizer, `named_parameters()` or a dict.
        max_norm: the largest norm allowed.
        total_norm: the norm of all gradients, from `get_total_norm`.
        foreach: as in `clip_grad_norm_`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> bridle.clip_grads_with_norm_([weight], 1.0, bridle.get_total_norm([weight.grad]))
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    limit, known = _check.threshold(max_norm, "max_norm"), _check.norm(total_norm)
    listed, grads = gradients(parameters)
    spans = _ranks.spans(grads)
    with turn(listed if spans else None):
        grads = Gradients.of(None, listed).local if spans else grads
        _measure.check_foreach(grads, foreach)
        if isinstance(known, Tensor) and _measure.readable_now([*grads, known]):
            known = float(known)
        _scale_down(grads, limit, known, foreach)


def _total(
    grads: list[Tensor], p: float, error_if_nonfinite: bool, foreach: bool | None, listed: Sequence[Tensor]
) -> tuple[Tensor, float | None]:
    """The norm as a tensor to return, and as a number where it could be had without waiting."""
    if not grads:
        return torch.tensor(0.0), 0.0
    _measure.check_foreach(grads, foreach)
    norm, value = _measure.total_norm(grads, p, foreach)
    if error_if_nonfinite and not math.isfinite(norm.item() if value is None else value):
        raise _nonfinite(_offenders(grads, listed), p, _measure.TOO_LARGE)
    return norm, value


def _total_over_ranks(
    grads: Gradients, p: float, error_if_nonfinite: bool, foreach: bool | None
) -> tuple[Tensor, float | None]:
    """The same where gradients lie on several ranks."""
    _measure.check_foreach(grads.local, foreach)
    norm = grads.total(p)
    value = norm.item() if grads.readable_now() else None
    if error_if_nonfinite and not math.isfinite(norm.item() if value is None else value):
        found = zip(grads.names(), grads.count_nonfinite().tolist(), strict=True)
        raise _nonfinite({name: int(n) for name, n in found if n}, p, grads.why_not_finite())
    return norm.to(_measure.result_dtype(grads.local, value)), value


def _scale_down(grads: list[Tensor], limit: float | Tensor, norm: float | Tensor, foreach: bool | None) -> None:
    """Multiply by `limit / (norm + eps)` where that is below 1. On the CPU nothing is written otherwise."""
    if not grads or (isinstance(limit, float) and limit == math.inf):
        return
    if isinstance(norm, float):
        ceiling = _check.on_host(limit, "max_norm")
        coefficient = ceiling / (norm + _EPS)
        if not coefficient >= 1 and ceiling != math.inf:  # a NaN norm scales too: torch's contract
            _apply.scale_(grads, coefficient, foreach)
        return
    with torch.no_grad():
        most = norm.to(reference.wide(norm.device)) + _EPS
        # Not a number over a tensor: torch makes that a reciprocal, which loses digits of a huge norm.
        factor = ((limit if isinstance(limit, Tensor) else most.new_full((), limit)) / most).clamp(max=1.0)
        if isinstance(limit, Tensor):
            factor = torch.where(limit == math.inf, 1.0, factor)
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
