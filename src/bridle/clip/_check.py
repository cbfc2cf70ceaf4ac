"""Arguments that cannot mean anything are refused before a gradient is touched."""

from __future__ import annotations

import math

from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from . import _measure

__all__ = ["norm", "number", "on_host", "order", "tensor_limit", "threshold"]


def threshold(value: float | Tensor, name: str) -> float | Tensor:
    """A limit: a number of zero or more, or a 0-dim tensor, which is not read here (it may live on a device)."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ArgumentError(f"`{name}` is one number; found a tensor of shape {tuple(value.shape)}.")
        return value.detach().reshape(())
    return _size(_float(value, f"`{name}` is a number"), name)


def number(value: float, name: str, low: float = 0.0, high: float = math.inf) -> float:
    """A number from `low` to `high`, both included."""
    found = _float(value, f"`{name}` is a number")
    if not low <= found <= high:
        raise ArgumentError(f"`{name}` lies between {low:g} and {high:g}; found {found:g}.")
    return found


def on_host(limit: float | Tensor, name: str) -> float:
    """The limit as a number, for gradients whose values can be read without waiting."""
    return _size(float(limit), name)


def norm(value: float | Tensor) -> float | Tensor:
    """A norm that is known already: whatever number it is, or a tensor of one, which is not read here."""
    return value if isinstance(value, Tensor) else _float(value, "`total_norm` is a number")


def tensor_limit(limit: float | Tensor, name: str) -> None:
    """Refuse a limit in a tensor that can be read without waiting, and means nothing."""
    if isinstance(limit, Tensor) and _measure.readable_now([limit]):
        on_host(limit, name)


def _float(value: object, expected: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # what it cannot convert it says itself
    except ValueError as error:
        raise ArgumentError(f"{expected}; found {value!r:.80}.") from error
    except TypeError as error:
        raise ArgumentTypeError(f"{expected}; found {value!r:.80}.") from error


def _size(number: float, name: str) -> float:
    if math.isnan(number) or number < 0:
        raise ArgumentError(f"`{name}` is a limit on a size, so it is zero or more; found {number}.")
    return number


def order(norm_type: float | str) -> float:
    """The p of a p-norm as a float; `"inf"` is one."""
    p = _float(norm_type, "the order of a norm is a number or 'inf'")
    if not p > 0:
        raise ArgumentError(f"the order of a norm is greater than zero; found {p}.")
    return p
