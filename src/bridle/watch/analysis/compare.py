"""Compare two runs in a few numbers."""

import math
from itertools import pairwise
from statistics import fmean, median

from ..run.run import Run
from .statistics import finite


def swing(values: list[float]) -> float:
    """Return the mean change from one value to the next, as a factor; NaN where there is none.

    A loss that falls evenly by 1% has 1.01; one that doubles and halves in turn has 2.
    """
    if len(values) < 3 or not all(0 < v < math.inf for v in values):
        return math.nan
    return math.exp(fmean(abs(math.log(b) - math.log(a)) for a, b in pairwise(values)))


def summary(run: Run) -> dict[str, float]:
    """Return the numbers to compare between runs, by name."""
    loss = finite(run.loss)
    block = max(1, len(loss) // 40)
    levels = [fmean(loss[i : i + block]) for i in range(0, len(loss) - block + 1, block)]
    test = [v for _, v in run.noted_losses("test")]
    late = levels[-max(1, len(levels) // 10) :]
    nothing = math.nan
    return {
        "swing of the training loss (factor from one stretch to the next)": swing(levels[len(levels) // 10 :]),
        "training loss, last tenth": fmean(late) if late else nothing,
        "swing of the test loss (factor from one report to the next)": swing(test[len(test) // 10 :]),
        "best test loss": min(finite(test), default=nothing),
        "final test loss": test[-1] if test else nothing,
        "median gradient norm": median(finite(run.norm)) if finite(run.norm) else nothing,
        "largest gradient norm": max(finite(run.norm), default=nothing),
        "non-finite steps": float(len(run.nonfinite)),
    }
