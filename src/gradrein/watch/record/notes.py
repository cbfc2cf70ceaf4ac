"""The values of a note, as a line of the record can hold them."""

import contextlib
from collections.abc import Mapping
from typing import Any

from ...errors import ArgumentError
from .writer import rounded

_OURS = {"note", "after", "rank"}


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and strings as JSON has them.

    Raises:
        ArgumentError: (a ValueError) something else, or a name that the line needs itself.
    """
    if taken := _OURS & values.keys():
        raise ArgumentError(f"note: the record itself uses the name {min(taken)!r}; give the value another.")
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "item"):  # of torch and numpy
        with contextlib.suppress(ValueError, RuntimeError):  # several elements
            value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return rounded([value], 9)[0]
    raise ArgumentError(
        f"note: {name!r} has to be a number or a string; found {type(value).__name__}. For a tensor with several "
        "elements, pass its mean or one of them."
    )
