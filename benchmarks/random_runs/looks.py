"""When a run is looked at, and what became of it."""

from __future__ import annotations

import math
import statistics

LOOKS = 40  # at the test loss; the last four are the last tenth of the run


def falls_on(step: int, steps: int, times: int) -> bool:
    """Return whether one of so many moments, evenly spread over the steps, falls on this one."""
    return step * times // steps > (step - 1) * times // steps


def final(looks: list[float]) -> float | None:
    """Return the mean of the last tenth; None where it is not finite."""
    mean = statistics.fmean(looks[-LOOKS // 10 :])
    return short(mean) if math.isfinite(mean) else None


def short(value: float) -> float:
    """Return a number with as many digits as are worth writing down."""
    return float(f"{value:.6g}")
