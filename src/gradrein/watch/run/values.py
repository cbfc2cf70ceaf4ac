"""Values of a record as the rest can use them."""

import math
from typing import Any

LARGEST = 1e100  # beyond it squares and sums overflow; no training has such values and is well

_MOST_TEXT = 1000
_HIDDEN = dict.fromkeys([*range(32), *range(127, 160), *range(55296, 57344)], "�")


def text(value: Any) -> str:
    """Return a string that can be printed and written to any file: no control characters, no lone surrogates."""
    return str(value)[:_MOST_TEXT].translate(_HIDDEN)


def number(value: Any) -> float:
    """Return a float; NaN of what is none. What exceeds `LARGEST` is infinite."""
    try:
        known = float(value) if isinstance(value, (int, float, str)) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except ValueError:
        return math.nan
    return known if -LARGEST <= known <= LARGEST else math.nan if known != known else math.copysign(math.inf, known)


def size(value: Any) -> float:
    """Return a number that cannot be negative, as a norm; NaN of one that is."""
    known = number(value)
    return known if known >= 0 else math.nan
