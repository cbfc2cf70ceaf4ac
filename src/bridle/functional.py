"""TensorFlow's clipping functions: out of place, over plain tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _measure, _validate
from ._torch.dtensor import any_dtensor
from .errors import UnsupportedGradientError

__all__ = ["clip_by_global_norm", "clip_by_norm", "clip_by_value"]


def clip_by_global_norm(
    tensors: Sequence[Tensor | None], clip_norm: float | Tensor, use_norm: float | Tensor | None = None
) -> tuple[list[Tensor | None], Tensor]:
    """Return new tensors whose norm as one vector is at most `clip_norm`, and the norm they had before.

    Args:
        tensors: The tensors; an entry that is None stays None.
        clip_norm: The largest norm allowed.
        use_norm: The norm of all tensors, where it is known already.

    Returns:
        The clipped tensors in order, and the norm as a 0-dim tensor. A norm that is not finite makes every
        value NaN, as in TensorFlow, so that it cannot pass unseen.

    Example:
        >>> clipped, norm = bridle.clip_by_global_norm([torch.tensor([3.0]), None, torch.tensor([4.0])], 1.0)
        >>> clipped, norm
        ([tensor([0.6000]), None, tensor([0.8000])], tensor(5.))
    """
    limit = _validate.threshold(clip_norm, "clip_norm")
    present = [t.detach() for t in tensors if t is not None]
    _refuse_dtensors(present, "clip_by_global_norm")
    if use_norm is not None:
        norm = torch.as_tensor(_validate.threshold(use_norm, "use_norm"))
    else:
        norm = _measure.total_norm(present, 2.0, None)[0] if present else torch.tensor(0.0)
    with torch.no_grad():
        factor = _factor(limit, norm.to(torch.float64) if norm.device.type != "mps" else norm)
        return [None if t is None else _times(t.detach(), factor) for t in tensors], norm


def clip_by_norm(tensor: Tensor, clip_norm: float | Tensor, axes: int | Sequence[int] | None = None) -> Tensor:
    """Return a new tensor whose norm is at most `clip_norm`: as a whole, or of each slice along `axes`.

    Args:
        tensor: The tensor.
        clip_norm: The largest norm allowed.
        axes: The dimensions a norm is taken over; all of them by default.

    Returns:
        The clipped tensor.

    Example:
        >>> bridle.clip_by_norm(torch.tensor([[3.0, 4.0], [0.0, 0.5]]), 1.0, axes=1)
        tensor([[0.6000, 0.8000],
                [0.0000, 0.5000]])
    """
    limit = _validate.threshold(clip_norm, "clip_norm")
    _refuse_dtensors([tensor], "clip_by_norm")
    with torch.no_grad():
        x = tensor.detach()
        return _times(x, _factor(limit, _measure.norm_along(x, axes)))


def clip_by_value(tensor: Tensor, clip_value_min: float | Tensor, clip_value_max: float | Tensor) -> Tensor:
    """Return a new tensor with every element limited to `[clip_value_min, clip_value_max]`.

    Args:
        tensor: The tensor.
        clip_value_min: The lower limit, a number or a tensor that broadcasts.
        clip_value_max: The upper limit, a number or a tensor that broadcasts.

    Returns:
        The clipped tensor.

    Example:
        >>> bridle.clip_by_value(torch.tensor([-2.0, 0.5, 3.0]), -1.0, 1.0)
        tensor([-1.0000,  0.5000,  1.0000])
    """
    with torch.no_grad():
        low, high = (torch.as_tensor(v, device=tensor.device) for v in (clip_value_min, clip_value_max))
        return torch.clamp(tensor.detach(), low.to(tensor.dtype), high.to(tensor.dtype))


def _refuse_dtensors(tensors: Sequence[Tensor], name: str) -> None:
    if any_dtensor(tensors):
        raise UnsupportedGradientError(
            f"{name} takes plain tensors, and was given a DTensor. Use clip_grad_norm_ or clip_, which take DTensors, "
            "or pass `full_tensor()`."
        )


def _factor(limit: float | Tensor, norm: Tensor) -> Tensor:
    """Return `limit / max(norm, limit)`: exactly 1 under the limit, no epsilon; NaN where the norm is not finite."""
    ceiling = torch.as_tensor(limit, dtype=norm.dtype, device=norm.device)
    scaled = torch.where(norm > ceiling, ceiling / norm, 1.0)
    return torch.where(norm < math.inf, scaled, math.nan)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """Return `x * factor`, rounded once to the type of `x`."""
    by = factor.to(x.device)
    # A 0-dim factor would be rounded to the type of `x` first.
    return (x * (by if by.dim() else by.reshape([1] * x.dim()))).to(x.dtype)
