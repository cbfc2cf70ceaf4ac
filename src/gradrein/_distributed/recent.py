"""What was made of the lists of the last calls: steps of one run ask about the same parameters again and again."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_KEPT = 4  # models that take turns, as in adversarial training


class Recent(Generic[_T]):
    """Results by the values they were made of, which are compared: quickly where they are the same objects as before.

    Threads may use it at once: what is kept is replaced, never changed.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, _T]] = []

    def of(self, values: Any, make: Callable[[], _T]) -> _T:
        """Return what was made of equal values, or make it. Nobody may change either of them afterwards."""
        for known, found in self._kept:
            if known == values:
                return found
        made = make()
        self._kept = [(values, made), *self._kept[: _KEPT - 1]]
        return made
