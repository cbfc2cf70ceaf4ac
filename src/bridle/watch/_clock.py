"""Where the time between two steps goes: inside backward passes, or outside of them.

Ranks that train together take equally long for a step, since in the backward pass they wait for the slowest. Who is
late shows outside: the time a rank needs by itself, for data and the forward pass.
"""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Two stop watches, of which one runs."""

    def __init__(self) -> None:
        self._depth = 0
        self._since: float | None = None  # not before the first step has ended: what was before is no step's
        self._outside = self._inside = 0.0

    def start(self) -> None:
        """A step has ended."""
        self._since, self._outside, self._inside = time.perf_counter(), 0.0, 0.0

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

    def read(self) -> tuple[float, float] | None:
        """Seconds outside of and inside backward passes since the last step ended, or None after none."""
        if self._since is None:
            return None
        self._outside += self._lap()
        return self._outside, self._inside

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._since = (0.0 if self._since is None else now - self._since), (None if self._since is None else now)
        return lap
