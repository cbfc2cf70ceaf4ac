"""Everything that a loss on other data is read from, together: what a `Monitor` switches on and off."""

import os
from collections.abc import Callable
from typing import Any

from ...format.schema import Line
from ..writer import rounded
from .criterion import CriterionLosses
from .lines import Reading
from .loggers import LoggerCalls
from .printed import PrintedLines

_MOST_CURVES, _MOST_POINTS = 40, 20_000


class CurveObserver:
    """Collects losses on other data, and writes them at the next step.

    Of several values of one curve between two steps, as of a progress bar, the last is kept.

    Args:
        write: Writes a line of the record.
        steps: Returns the number of steps so far.
    """

    def __init__(self, write: Callable[[Line], None], steps: Callable[[], int]) -> None:
        self._write, self._steps = write, steps
        self._process = os.getpid()
        self._on = True
        self._waiting: dict[tuple[str, str], Line] = {}
        self._points: dict[tuple[str, str], int] = {}
        self._last_shown: dict[tuple[str, str], tuple[str, float | None]] = {}
        self._printed = PrintedLines(self._on_printed)
        self._criterion = CriterionLosses()
        self._loggers = LoggerCalls(lambda name, origin, value: self._put(name, origin, value))

    def install(self) -> None:
        """Begin to observe."""
        self._printed.install()
        self._criterion.install()
        self._loggers.look()

    def remove(self) -> None:
        """Write what is left, and put everything back."""
        self.on_step()
        self._printed.remove()
        self._criterion.remove()
        self._loggers.remove()

    def on_step(self) -> None:
        """Write what has come since the last step. A failure ends the reading of curves and nothing else."""
        if self._on:
            try:
                self._flush()
            except Exception:
                self._on = False

    def _flush(self) -> None:
        self._loggers.look()
        for name, value in self._criterion.take().items():
            self._put(name, "no_grad", value)
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for line in waiting.values():
                self._write(line)

    def _on_printed(self, reading: Reading, is_bar: bool) -> None:
        more: dict[str, Any] = {} if reading.epoch is None else {"epoch": reading.epoch}
        if not reading.named:
            more["unnamed"] = True
            if reading.train is not None:
                more["train"] = rounded([reading.train], 9)[0]
        key, shown = (reading.name, "printed"), (str(reading.value), reading.epoch)
        if is_bar and shown == self._last_shown.get(key):
            return
        self._last_shown[key] = shown
        self._put(*key, reading.value, **more)

    def _put(self, name: str, origin: str, value: float, **more: Any) -> None:
        key = (name, origin)
        if os.getpid() != self._process or (key not in self._points and len(self._points) >= _MOST_CURVES):
            return
        if key not in self._waiting:
            self._points[key] = self._points.get(key, 0) + 1
        if self._points[key] > _MOST_POINTS:
            return
        digits = rounded([float(value)], 9)[0]
        self._waiting[key] = {"curve": name, "origin": origin, "value": digits, "after": self._steps(), **more}
