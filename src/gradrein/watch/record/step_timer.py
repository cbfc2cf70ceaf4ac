"""Measure where the time between two steps goes: inside backward passes, outside, and into loading data.

Ranks that train together take equally long for a step, since in the backward pass they wait for the slowest. A late
rank shows outside: in the time it needs by itself, for data and the forward pass. Where parameters are sharded, ranks
wait in the forward pass too, and only the time for data is a rank's own.
"""

import time


class StepTimer:
    """Adds up the time since the last step ended, inside and outside backward passes."""

    def __init__(self) -> None:
        self._depth = 0
        self._since: float | None = None  # None before the first step has ended: that time belongs to no step
        self._host = self._backward = self._data = 0.0

    def start(self) -> None:
        """Start over: a step has ended."""
        self._since = time.perf_counter()
        self._host = self._backward = self._data = 0.0

    def add_data(self, seconds: float) -> None:
        """Add time that was spent waiting for data."""
        self._data += seconds

    def enter_backward(self) -> None:
        """Count as backward from now on; calls may be nested."""
        if self._depth == 0:
            self._host += self._lap()
        self._depth += 1

    def leave_backward(self) -> None:
        """Count as host time again."""
        self._depth -= 1
        if self._depth == 0:
            self._backward += self._lap()

    def read(self) -> tuple[float, float, float] | None:
        """Return seconds outside and inside backward passes, and waiting for data; None before the first step."""
        if self._since is None:
            return None
        self._host += self._lap()
        return self._host, self._backward, self._data

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._since = (0.0 if self._since is None else now - self._since), (None if self._since is None else now)
        return lap
