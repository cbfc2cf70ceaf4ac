"""Compare runs in a few numbers."""

import math
from statistics import fmean, median

from ..run.run import Run
from .losses import levels_of, losses_of
from .signs import heights
from .statistics import finite

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 30


def over_lowest(values: list[float]) -> float:
    """Return how many times its lowest value so far a curve is, on average (geometric mean).

    1 for a curve that only falls, 10 for one that stands ten times above its lowest; NaN where a value is not above 0.
    """
    if not values or not all(0 < v < math.inf for v in values):
        return math.nan
    return math.exp(sum(heights([math.log(v) for v in values])) / len(values))  # the ratio itself may overflow


def summary(run: Run) -> dict[str, float]:
    """Return the numbers to compare between runs, by name."""
    *others, trained = losses_of(run)
    test = others[0].values if others else []
    levels = levels_of(trained)
    late = levels[-max(1, len(levels) // 10) :]
    nothing = math.nan
    return {
        "final test loss": test[-1] if test else nothing,
        "lowest test loss": min(test, default=nothing),
        "test loss over its lowest so far (average factor)": over_lowest(test),
        "training loss, last tenth": fmean(late) if late else nothing,
        "lowest training loss (averaged over 1/40 of the run)": min(levels, default=nothing),
        "training loss over its lowest so far (average factor)": over_lowest(levels),
        "median gradient norm": median(finite(run.norm)) if finite(run.norm) else nothing,
        "largest gradient norm": max(finite(run.norm), default=nothing),
        "non-finite steps": float(len(run.nonfinite)),
    }


def sparkline(levels: list[float]) -> str:
    """Draw a curve as bars, on a logarithmic scale where it can be."""
    if not levels:
        return ""
    log = min(levels) > 0
    ys = [math.log(v) if log else v for v in levels]
    size = max(1, len(ys) / _COLUMNS)
    columns = [max(ys[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))]) for i in range(int(len(ys) / size))]
    low, high = min(columns), max(columns)
    return "".join(_BARS[int((y - low) / (high - low) * 7.999) if high > low else 0] for y in columns)
