"""Values of a record as the rest can use them, whatever the file holds."""

import math
from typing import Any

LARGEST = 1e100  # beyond it squares and sums overflow; no training has such values and is well

_MOST_TEXT = 1000
_MOST_STEPS = 2**53
_HIDDEN = dict.fromkeys([*range(32), *range(127, 160), *range(55296, 57344)], "�")


def text(value: Any) -> str:
    """Return a string that can be printed and written to any file: no control characters, no lone surrogates."""
    return str(value)[:_MOST_TEXT].translate(_HIDDEN)


def number(value: Any) -> float:
    """Return a float; NaN of what is none. What exceeds `LARGEST` is infinite."""
    try:
        found = float(value) if isinstance(value, (int, float, str)) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except ValueError:
        return math.nan
    return found if -LARGEST <= found <= LARGEST else math.nan if found != found else math.copysign(math.inf, found)


def size(value: Any) -> float:
    """Return a number that cannot be negative, as a norm; NaN of one that is."""
    found = number(value)
    return found if found >= 0 else math.nan


def sizes(values: list[Any]) -> list[float | None]:
    """Return `size` of each, None of None."""
    if all(type(v) is float and 0.0 <= v <= LARGEST for v in values):
        return values
    return [None if v is None else size(v) for v in values]


def whole(value: Any, least: int = 0) -> int | None:
    """Return a whole number in the range of steps; None of anything else."""
    known = type(value) is int and least <= value <= _MOST_STEPS
    return value if known else None


def list_of(kind: type, value: Any, length: int | None = None) -> list[Any] | None:
    """Return a list whose elements are of a type, of some length; None of anything else."""
    known = isinstance(value, list) and length in (None, len(value)) and all(type(v) is kind for v in value)
    return value if known else None
