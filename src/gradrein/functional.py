"""TensorFlow's clipping functions: out of place, on plain tensors. Results have no graph."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import _measure, _validate
from ._devices import accumulation_dtype
from ._torch.dtensor import any_dtensor
from ._torch.modes import inside_func_transform, is_differentiated_by_func
from ._torch.pytree import flatten
from .errors import ArgumentError, ArgumentTypeError, UnsupportedGradientError

__all__ = ["clip_by_global_norm", "clip_by_norm", "clip_by_value"]

_Tree = TypeVar("_Tree")


def clip_by_global_norm(
    tensors: _Tree, clip_norm: float | Tensor, use_norm: float | Tensor | None = None
) -> tuple[_Tree, Tensor]:
    """Return new tensors whose total norm is at most `clip_norm`, and the norm before clipping.

    Args:
        tensors: The tensors: a list, a tuple, a dict, or a nested structure of those. None entries stay None.
        clip_norm: The largest norm allowed.
        use_norm: The norm of all tensors, if it is already known.

    Returns:
        The clipped tensors in the same structure (a list for an iterator), and the norm as a 0-dim tensor. A
        norm that is not finite makes every value NaN, as in TensorFlow, so that it cannot go unnoticed.

    Raises:
        ArgumentError: (a ValueError) Something other than tensors and None, or a limit that is negative or NaN.

    Examples:
        >>> clipped, norm = gradrein.clip_by_global_norm([torch.tensor([3.0]), None, torch.tensor([4.0])], 1.0)
        >>> clipped, norm
        ([tensor([0.6000]), None, tensor([0.8000])], tensor(5.))
        >>> gradrein.clip_by_global_norm({"weight": torch.tensor([3.0, 4.0])}, 1.0)[0]
        {'weight': tensor([0.6000, 0.8000])}

    See Also:
        [`gradrein.clip_by_norm`][], [`gradrein.clip_grad_norm_`][]
    """
    limit = _validate.threshold(clip_norm, "clip_norm")
    leaves, rebuild = flatten(list(tensors) if isinstance(tensors, Iterator) else tensors)
    present = [_checked(t, "clip_by_global_norm").detach() for t in leaves if t is not None]
    known = None if use_norm is None else _validate.threshold(use_norm, "use_norm")
    with torch.no_grad():
        norm, exact = _norm(present) if known is None else _known(known, present)
        factor = _measure.clip_factor(limit, exact, if_not_finite=math.nan)
        return rebuild([None if t is None else _times(t.detach(), factor) for t in leaves]), norm


def clip_by_norm(tensor: Tensor, clip_norm: float | Tensor, axes: int | Sequence[int] | None = None) -> Tensor:
    """Return a new tensor whose norm, as a whole or for each slice along `axes`, is at most `clip_norm`.

    Args:
        tensor: The tensor.
        clip_norm: The largest norm allowed.
        axes: The dimensions over which the norm is computed; all of them by default.

    Returns:
        The clipped tensor.

    Raises:
        ArgumentError: (a ValueError) Not a tensor, a limit that is negative or NaN, or a dimension that does not exist.

    Examples:
        >>> gradrein.clip_by_norm(torch.tensor([[3.0, 4.0], [0.0, 0.5]]), 1.0, axes=1)
        tensor([[0.6000, 0.8000],
                [0.0000, 0.5000]])

    See Also:
        [`gradrein.clip_by_global_norm`][], [`gradrein.clip_`][]
    """
    limit = _validate.threshold(clip_norm, "clip_norm")
    x = _checked(tensor, "clip_by_norm").detach()
    _check_axes(axes, x.dim())
    with torch.no_grad():
        factor = _measure.clip_factor(limit, _measure.norm_along(x, axes), if_not_finite=math.nan)
        return _times(x, factor)


def clip_by_value(tensor: Tensor, clip_value_min: float | Tensor, clip_value_max: float | Tensor) -> Tensor:
    """Return a new tensor with every element limited to `[clip_value_min, clip_value_max]`.

    Args:
        tensor: The tensor.
        clip_value_min: The lower limit, a number or a tensor that broadcasts to its shape.
        clip_value_max: The upper limit, a number or a tensor that broadcasts to its shape.

    Returns:
        The clipped tensor.

    Raises:
        ArgumentError: (a ValueError) Not a tensor, or limits that are NaN, in the wrong order or of another shape.

    Examples:
        >>> gradrein.clip_by_value(torch.tensor([-2.0, 0.5, 3.0]), -1.0, 1.0)
        tensor([-1.0000,  0.5000,  1.0000])

    See Also:
        [`gradrein.clip_by_norm`][], [`gradrein.clip_grad_value_`][]
    """
    _check_tensor(tensor, "clip_by_value")
    _refuse_derivative(tensor, "clip_by_value")
    if not tensor.is_floating_point():
        raise UnsupportedGradientError(
            f"clip_by_value: only real floating-point tensors are limited by value, and this one is {tensor.dtype}. "
            "For complex tensors, use gradrein.clip_by_norm; for integers, torch.clamp."
        )
    low = _bound(clip_value_min, "clip_value_min", tensor)
    high = _bound(clip_value_max, "clip_value_max", tensor)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low > high:
        raise ArgumentError(f"clip_by_value: clip_value_min is {low:g} and clip_value_max {high:g}; swap them.")
    with torch.no_grad():
        ends = (torch.as_tensor(bound, device=tensor.device).to(tensor.dtype) for bound in (low, high))
        return torch.clamp(tensor.detach(), *ends)


def _check_tensor(given: Any, caller: str) -> None:
    if not isinstance(given, Tensor):
        raise ArgumentTypeError(
            f"{caller}: a tensor was expected, found {type(given).__name__}: {given!r:.80}. Pass a tensor; several of "
            "them go to clip_by_global_norm, as in clip_by_global_norm([p.grad for p in model.parameters()], 1.0)."
        )


def _refuse_derivative(tensor: Tensor, caller: str) -> None:
    """Refuse to be differentiated by a `torch.func` transform; elsewhere the result is seen to have no graph."""
    if inside_func_transform() and is_differentiated_by_func(tensor):
        raise UnsupportedGradientError(
            f"{caller} is not differentiable, and torch.func would compute a derivative of zero. Clip gradients after "
            "they are computed; to clip a tensor that needs a gradient, pass `tensor.detach()`."
        )


def _checked(given: Any, caller: str) -> Tensor:
    """Return what is a plain tensor of real or complex numbers; refuse anything else."""
    _check_tensor(given, caller)
    tensor: Tensor = given
    _refuse_derivative(tensor, caller)
    if any_dtensor([tensor]):
        raise UnsupportedGradientError(
            f"{caller} takes plain tensors, and was given a DTensor. Use clip_grad_norm_ or clip_, which take "
            "DTensors, or pass `full_tensor()`."
        )
    _measure.check_kind(tensor)
    return tensor


def _check_axes(axes: Any, dims: int) -> None:
    several = [axes] if isinstance(axes, int) else [] if axes is None else axes
    are_dims = isinstance(several, list | tuple) and all(isinstance(d, int) and -dims <= d < dims for d in several)
    if not are_dims or len({d % dims for d in several}) < len(several):
        raise ArgumentError(
            f"clip_by_norm: `axes` are dimensions of the tensor, which has {dims}, each once, as in axes=0 or "
            f"axes=(0, 1); found {axes!r:.80}."
        )


def _bound(value: Any, name: str, tensor: Tensor) -> float | Tensor:
    """Return a limit that the type of the tensor can hold."""
    if isinstance(value, Tensor):
        _check_bounds(value, name, tensor)
        return value
    bound = _validate.real(value, f"clip_by_value: `{name}` is a number or a tensor")
    if math.isnan(bound):
        raise ArgumentError(f"clip_by_value: `{name}` is a number that {tensor.dtype} can hold; found {bound}.")
    most = math.inf if math.isinf(bound) else torch.finfo(tensor.dtype).max
    return max(min(bound, most), -most)


def _check_bounds(value: Tensor, name: str, tensor: Tensor) -> None:
    """Refuse a tensor of limits that does not broadcast to the tensor, or that its type cannot hold."""
    sizes = zip(reversed(value.shape), reversed(tensor.shape), strict=False)
    fits = value.dim() <= tensor.dim() and all(size in (1, full) for size, full in sizes)
    if not fits or value.is_complex():
        raise ArgumentError(
            f"clip_by_value: `{name}` broadcasts to the tensor, {tensor.dtype} of shape {tuple(tensor.shape)}; found "
            f"{value.dtype} of shape {tuple(value.shape)}."
        )


def _norm(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors, to return and to compute with."""
    if not tensors:
        return _known(0.0, [])
    if inside_func_transform():  # no kernel and no multi-tensor operation can be vectorised
        each = [_measure.norm_along(t, None).reshape(()) for t in tensors]
        norm = _measure.total(torch.stack([n.to(each[0].device) for n in each]), 2.0)
        return norm.to(_measure.result_dtype(tensors, None)), norm
    norm, exact = _measure.total_norm(tensors, 2.0, None)
    return norm, torch.as_tensor(exact, dtype=accumulation_dtype(norm.device), device=norm.device)


def _known(norm: float | Tensor, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the same of a norm that was passed, a number on the device of the tensors."""
    home = norm.device if isinstance(norm, Tensor) else tensors[0].device if tensors else torch.device("cpu")
    return torch.as_tensor(norm, device=home), torch.as_tensor(norm, dtype=accumulation_dtype(home), device=home)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """Return `x * factor`, rounded once to the type of `x`."""
    by = factor.to(x.device)
    # A 0-dim factor would be rounded to the type of `x` first.
    return (x * (by if by.dim() else by.reshape([1] * x.dim()))).to(x.dtype)
