"""The clipping functions of `torch.nn.utils` under their own names and contract, right where torch is not.

`docs/clipping.md` lists every difference.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from .. import _devices, _measure, _validate
from .._events import describe_norm, describe_value, notify_clip
from ..distributed import PlacementSpec
from . import _apply
from ._gate import enter, enter_tensors, whole_number
from .target.parameters import Target, parameters_of
from .target.patterns import describe

_EPS = 1e-6  # torch's: part of the contract of its names


@notify_clip(parameters_of, describe_norm)
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
    p, limit = _validate.norm_order(norm_type), _validate.threshold(max_norm, "max_norm")
    call = lambda: f"clip_grad_norm_(max_norm={describe(limit)}, norm_type={p}, {error_if_nonfinite=})"  # noqa: E731
    grads = enter(parameters, placement, call)
    norm, value = grads.measure_total(p, foreach, error_if_nonfinite)
    _scale_down_(grads.local, limit, value, foreach)
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


@notify_clip(parameters_of, describe_value)
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
    limit = _validate.threshold(clip_value, "clip_value")
    grads = enter(parameters, None, lambda: f"clip_grad_value_({describe(limit)})", measured=False)
    grads.refuse_partial("clip_grad_value_")
    _measure.check_foreach(grads.local, foreach)
    if isinstance(limit, Tensor) and _devices.readable_now([limit, *grads.local]):
        limit = _validate.read_threshold(limit, "clip_value")
    if grads.local:
        _apply.clamp_(grads.local, limit, foreach)


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
    p = _validate.norm_order(norm_type)
    grads = enter_tensors(tensors, lambda: f"get_total_norm({p}, {error_if_nonfinite=})")
    return grads.measure_total(p, foreach, error_if_nonfinite)[0]


@notify_clip(parameters_of, describe_norm)
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
    limit, known = _validate.threshold(max_norm, "max_norm"), _validate.total_norm(whole_number(total_norm))

    def call() -> str:
        readable = isinstance(known, float) or _devices.readable_now([known])
        about = f"{float(known):.6g}" if readable else "a tensor"  # sums of torch may differ in the last bit
        return f"clip_grads_with_norm_({describe(limit)}, total_norm={about})"

    grads = enter(parameters, None, call, measured=False)
    _measure.check_foreach(grads.local, foreach)
    if isinstance(known, Tensor) and _devices.readable_now([*grads.local, known]):
        known = float(known)
    _scale_down_(grads.local, limit, known, foreach)


def _scale_down_(grads: list[Tensor], limit: float | Tensor, norm: float | Tensor, foreach: bool | None) -> None:
    """Multiply by `limit / (norm + eps)` where that is below 1. On the CPU nothing is written otherwise."""
    if not grads or (isinstance(limit, float) and limit == math.inf):
        return
    if isinstance(norm, float):
        ceiling = limit if isinstance(limit, float) else _validate.read_threshold(limit, "max_norm")
        coefficient = ceiling / (norm + _EPS)
        if not coefficient >= 1 and ceiling != math.inf:  # a NaN norm scales too: torch's contract
            _apply.scale_(grads, coefficient, foreach)
        return
    with torch.no_grad():
        exact = norm.to(_devices.accumulation_dtype(norm.device))
        factor = _measure.clip_factor(limit, exact, eps=_EPS, if_not_finite=None)
        _apply.scale_(grads, factor, foreach)
