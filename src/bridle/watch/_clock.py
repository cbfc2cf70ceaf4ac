"""Where the time between two steps goes: inside backward passes or outside of them, and how much into loading data.

Ranks that train together take equally long for a step, since in the backward pass they wait for the slowest. Who is
late shows outside: the time a rank needs by itself, for data and the forward pass. Where parameters lie on several
ranks these wait in the forward pass too, and only the time for data is a rank's own.
"""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Two stop watches, of which one runs."""

    def __init__(self) -> None:
        self._depth = 0
        self._since: float | None = None  # not before the first step has ended: what was before is no step's
        self._outside = self._inside = self._loading = 0.0

    def start(self) -> None:
        """A step has ended."""
        self._since = time.perf_counter()
        self._outside = self._inside = self._loading = 0.0

    def loaded(self, seconds: float) -> None:
        """Data was waited for."""
        self._loading += seconds

    def enter(self) -> None:
        """A backward pass begins, perhaps inside another."""
        if self._depth == 0:
            self._outside += self._lap()
        self._depth += 1

    def leave(self) -> None:
        """It ends."""
        self._depth -= 1
        if self._depth == 0:
            self._inside += self._lap()

    def read(self) -> tuple[float, float, float] | None:
        """Seconds outside of and inside backward passes, and loading, since the last step ended; None after none."""
        if self._since is None:
            return None
        self._outside += self._lap()
        return self._outside, self._inside, self._loading

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._since = (0.0 if self._since is None else now - self._since), (None if self._since is None else now)
        return lap
