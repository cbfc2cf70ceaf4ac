"""Argument checks: refuse what has no meaning before a gradient is touched."""

import math
from typing import Any

import torch
from torch import Tensor

from . import _devices
from ._torch.dtensor import is_dtensor, local_tensor
from .errors import ArgumentError, ArgumentTypeError


def threshold(value: float | Tensor, name: str) -> float | Tensor:
    """Return a limit: a number of zero or more, or a 0-dim tensor, which is not read (it may live on a device)."""
    if type(value) is float and value >= 0:
        return value
    if isinstance(value, Tensor):
        return one_number(value, f"`{name}` is one number")
    return _size(_float(value, f"`{name}` is a number"), name)


def read_threshold(limit: float | Tensor, name: str) -> float:
    """Return the limit as a number, where it can be read without waiting for a device."""
    return _size(float(limit), name)


def tensor_threshold(limit: float | Tensor, name: str) -> None:
    """Refuse a negative or NaN limit in a tensor that can be read without waiting for a device."""
    if isinstance(limit, Tensor) and _devices.readable_now([limit]):
        read_threshold(limit, name)


def number(value: float, name: str, low: float = 0.0, high: float = math.inf) -> float:
    """Return a number from `low` to `high`, both included."""
    converted = _float(value, f"`{name}` is a number")
    if not low <= converted <= high:
        raise ArgumentError(f"`{name}` must be between {low:g} and {high:g}; found {converted:g}.")
    return converted


def real(value: object, expected: str) -> float:
    """Return one number, also from a tensor of one. `expected` says in the error what is meant."""
    if isinstance(value, bool | str | bytes):
        raise ArgumentTypeError(f"{expected}; found {value!r:.80}.")
    return _float(value, expected)


def finite(value: object, expected: str, *, above_zero: bool = False) -> float:
    """Return a finite number of zero or more, or above zero."""
    converted = real(value, expected)
    if not 0 <= converted < math.inf or (above_zero and not converted):
        raise ArgumentError(
            f"{expected}, finite and {'above zero' if above_zero else 'not negative'}; found {converted:g}."
        )
    return converted


def one_number(value: object, expected: str) -> Tensor:
    """Return a real number as a tensor of one, which is not read. `expected` says in the error what is meant."""
    if not isinstance(value, Tensor):
        return torch.tensor(real(value, expected), dtype=torch.float64, device="cpu")
    _refuse_no_number(value, expected)
    return local_tensor(value.detach()).reshape(())


def floor_and_ceiling(floor: float, ceiling: float) -> tuple[float, float]:
    """Return the bounds of a limit, in order."""
    low, high = number(floor, "floor"), number(ceiling, "ceiling")
    if low > high:
        raise ArgumentError(f"`floor` is {low:g} and `ceiling` {high:g}; swap them.")
    return low, high


def count(value: int, name: str, least: int = 1) -> int:
    """Return a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"`{name}` is a whole number of at least {least}; found {value!r:.80}.")
    return value


def total_norm(value: float | Tensor) -> float | Tensor:
    """Return a known norm: any number, or a tensor of one, which is not read."""
    expected = "`total_norm` is a number"
    return one_number(value, expected) if isinstance(value, Tensor) else _float(value, expected)


def norm_order(norm_type: float | str) -> float:
    """Return the p of a p-norm as a float; `"inf"` is one."""
    p = norm_type if type(norm_type) is float else _float(norm_type, "the order of a norm must be a number or 'inf'")
    if not p > 0:
        raise ArgumentError(f"the order of a norm must be greater than zero; found {p}.")
    return p


def _refuse_no_number(value: Any, expected: str) -> None:
    if value.numel() != 1:
        raise ArgumentError(f"{expected}; found a tensor of shape {tuple(value.shape)}.")
    if value.is_complex():
        raise ArgumentTypeError(f"{expected}; found a complex tensor.")
    if is_dtensor(value) and not all(kind.is_replicate() for kind in value.placements):
        raise ArgumentError(
            f"{expected}, the same on every rank; found a DTensor with placements {value.placements}, of which each "
            "rank holds a part. Pass its `full_tensor()`."
        )


def _float(value: object, expected: str) -> float:
    if isinstance(value, Tensor):
        _refuse_no_number(value, expected)
    try:
        return float(value)  # type: ignore[arg-type]  # what it cannot convert it says itself
    except ValueError as error:
        raise ArgumentError(f"{expected}; found {value!r:.80}.") from error
    except TypeError as error:
        raise ArgumentTypeError(f"{expected}; found {value!r:.80}.") from error


def _size(number: float, name: str) -> float:
    if math.isnan(number) or number < 0:
        raise ArgumentError(f"`{name}` must be zero or more; found {number}.")
    return number
