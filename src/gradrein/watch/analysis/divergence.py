"""Whether a run ends lost for good, and where that began: for runs of any length."""

import math
from statistics import median

from ..run.run import Run
from .statistics import finite

GROWTH = 1e6
_SMALLEST = 1e-3  # a value that begins at next to nothing may grow by any factor and be healthy
_WIDTH = 3
_ABOVE = {"training loss": 3.0, "gradient norm": 10.0}  # above so many times the lowest level for good: no more healthy


def divergence(run: Run) -> tuple[str, float, int] | None:
    """Return what grows without end, its lowest level, and the index of the step from which it is above for good.

    None where nothing does. The gradient norm counts where the loss is not known to grow.
    """
    growth = _growth("training loss", run.loss)
    losses = finite(run.loss)
    if growth is None and not (losses and losses[-1] <= losses[0]):
        growth = _growth("gradient norm", run.norm)
    return growth


def broke_at(run: Run) -> float:
    """Return the part of a run's steps after which it is lost: it diverges or stays not finite; infinity if it is not.

    A part and not a number, as optimizers of one run may step at different rates.
    """
    bad = {event.step for event in run.nonfinite}
    last = max((i for i, step in enumerate(run.steps) if step not in bad), default=-1)
    lost = divergence(run)
    first = min(last + 1, len(run.steps) if lost is None else lost[2])
    return (run.steps[first] + 1) / (run.steps[-1] + 1) if first < len(run.steps) else math.inf


def healthy_norms(run: Run) -> list[float]:
    """Return the gradient norms before a run diverged, where it did."""
    known, lost = finite(run.loss), divergence(run)
    start = min(median(known[:5]), median(known[:20])) if known else math.nan
    bad = {event.step for event in run.nonfinite}
    end = next((i for i, step in enumerate(run.steps) if step in bad), len(run.steps))
    end = end if lost is None else min(end, lost[2])
    rows = zip(run.norm[:end], run.loss[:end], strict=True)
    above = _ABOVE["training loss"]
    return [n for n, v in rows if math.isfinite(n) and n > 0 and not (start > 0 and v > above * start)]


def _growth(what: str, values: list[float]) -> tuple[str, float, int] | None:
    rows = [(i, v) for i, v in enumerate(values) if math.isfinite(v)]
    width = _WIDTH if len(rows) >= 2 * _WIDTH else 1
    levels = [median(v for _, v in rows[i : i + width]) for i in range(len(rows) - width + 1)]
    if len(levels) < 2:
        return None
    lowest, last = min(levels), rows[-1][1]
    size = lowest if lowest > 0 else max(abs(lowest), abs(levels[0]))
    if last <= GROWTH * max(size, _SMALLEST):
        return None
    return what, lowest, 1 + max((i for i, v in rows if v <= _ABOVE[what] * size), default=-1)
