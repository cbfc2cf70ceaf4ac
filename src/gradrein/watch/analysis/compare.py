"""Compare runs in a few numbers."""

import math
from dataclasses import dataclass
from statistics import fmean, median

from ..run.run import Run
from .advice import SYMPTOMS
from .finding import Finding
from .losses import Loss, losses_of
from .statistics import finite

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 30


def over_lowest(values: list[float]) -> float:
    """Return how many times its lowest value so far a curve is, on average (geometric mean).

    1 for a curve that only falls, 10 for one that stands ten times above its lowest; NaN where a value is not above 0.
    """
    if not values or not all(0 < v < math.inf for v in values):
        return math.nan
    lowest, found = math.inf, []
    for v in values:
        lowest = min(lowest, v)
        found.append(math.log(v) - math.log(lowest))  # the ratio itself may overflow
    return math.exp(fmean(found))


def summary(run: Run) -> dict[str, float]:
    """Return the numbers to compare between runs, by name."""
    *others, trained = losses_of(run)
    test = others[0].values if others else []
    levels = trained.levels
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


@dataclass(frozen=True)
class Outcome:
    """What came of a run, up to a step that all runs reached.

    Attributes:
        name: Which loss this is about.
        final: Its last level; infinite where the run was lost.
        lowest: Its lowest level.
        over: How many times its lowest so far it is, on average.
        swings: Whether a finding says that it could end lower, diverges, or is not finite.
        sparkline: The curve in a line of text.
        training_rise: How many times above its lowest the training loss ends; NaN where it is not known.
    """

    name: str
    final: float
    lowest: float
    over: float
    swings: bool
    sparkline: str
    training_rise: float = math.nan

    @property
    def order(self) -> tuple[bool, float]:
        """What runs are ordered by, the best first."""
        return self.swings, self.final if math.isfinite(self.final) else math.inf


def outcome(run: Run, findings: list[Finding], steps: int) -> Outcome:
    """Return what came of a run with these findings in its first `steps` steps."""
    *others, trained = losses_of(run)
    loss = next((one for one in others if len(one.values) >= 2), trained)
    levels, training = _levels_until(loss, steps), _levels_until(trained, steps)
    bad = {finding.name for finding in findings}.intersection(SYMPTOMS)
    lost = not finite(run.loss[-5:]) and bool(run.loss)
    final = math.inf if lost or not levels else levels[-1]
    rise = training[-1] / min(training) if training and min(training) > 0 else math.nan
    lowest = min(levels, default=math.nan)
    return Outcome(loss.name, final, lowest, over_lowest(levels), bool(bad), _sparkline(levels), rise)


def _levels_until(loss: Loss, steps: int) -> list[float]:
    kept = [v for s, v in zip(loss.steps, loss.values, strict=True) if s <= steps]
    return Loss(loss.name, loss.batches, list(range(len(kept))), kept, loss.origin).levels


def _sparkline(levels: list[float]) -> str:
    """Draw a curve as bars, on a logarithmic scale where it can be."""
    if not levels:
        return ""
    log = min(levels) > 0
    ys = [math.log(v) if log else v for v in levels]
    size = max(1, len(ys) / _COLUMNS)
    columns = [max(ys[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))]) for i in range(int(len(ys) / size))]
    low, high = min(columns), max(columns)
    return "".join(_BARS[int((y - low) / (high - low) * 7.999) if high > low else 0] for y in columns)
