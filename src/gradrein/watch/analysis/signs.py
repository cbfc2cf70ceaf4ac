"""Whether a run could be better: a few plain numbers, weighted by what would have helped other runs.

Each number grows with trouble. Their weights, and the sum from which a report speaks, are in `calibrated.py`, which
`make calibrate` writes from random training runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ..run.run import Run
from .calibrated import LIMITS, WEIGHTS
from .statistics import finite, quantile, relative

_MOST = 5.0  # beyond a factor of 150 nothing is worse
_LEAST_STEPS, _LEAST_POINTS = 40, 5
_PARTS = 20  # means of so many parts of the training loss: single batches are noise
_TEST = "test loss, end over lowest"


@dataclass(frozen=True)
class Signs:
    """What was seen of a run, and what it adds up to.

    Attributes:
        values: The numbers, by name; without those that are not known.
        parts: What each adds to the sum.
        score: The sum over its limit: above zero the run is one that could be better.
    """

    values: dict[str, float]
    parts: dict[str, float]
    score: float

    @property
    def speak(self) -> bool:
        """Whether a report has something to say."""
        return self.score > 0


def signs_of(run: Run) -> Signs:
    """Measure a run, and weigh what was found."""
    values = measure(run)
    kind = "with a test loss" if _TEST in values else "without"
    parts = {name: weight * values[name] for name, weight in WEIGHTS[kind].items() if name in values}
    return Signs(values, parts, sum(parts.values()) - LIMITS[kind])


def measure(run: Run) -> dict[str, float]:
    """Return the numbers of a run that are known."""
    losses, test = finite(run.loss), finite(run.test.values) if run.test is not None else []
    found: dict[str, float] = {}
    if len(losses) >= _LEAST_STEPS and min(losses) > 0:
        found |= _of_curve("training loss", _means(losses, _PARTS))
    if len(test) >= _LEAST_POINTS and min(test) > 0:
        found |= _of_curve("test loss", test)
    norms = finite(relative(run.norm, 51))
    is_clipped = any(factor < 1 for factor in finite(run.clip))  # then large ones do no harm
    if len(norms) >= _LEAST_STEPS and not is_clipped:
        found["gradient norms, largest over usual"] = min(_MOST, quantile(norms, 0.99) - quantile(norms, 0.5))
    cosines = finite(run.step_grad_cosine)
    if len(cosines) >= _LEAST_STEPS:
        found["steps that overshoot"] = sum(1 for c in cosines if c > 0) / len(cosines)
    return found


def _of_curve(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the logarithm of the last tenth over the lowest, and the mean one of each value over those before."""
    lowest, heights = values[0], []
    for value in values[1:]:
        heights.append(max(0.0, math.log(value / lowest)))
        lowest = min(lowest, value)
    end = math.log(fmean(values[-max(1, len(values) // 10) :]) / lowest)
    return {
        f"{name}, end over lowest": min(_MOST, end),
        f"{name}, height above the lowest so far": min(_MOST, fmean(heights)),
    }


def _means(values: Sequence[float], parts: int) -> list[float]:
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]
