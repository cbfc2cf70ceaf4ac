"""Whether a run could be better: a few plain numbers, weighed by what would have helped other runs.

Each number grows with trouble. Their weights, the sum from which a report speaks, and what to advise then are in
`calibrated.py`, which `make calibrate` writes from random training runs.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from ..run.run import Run
from .calibrated import LIMITS, WEIGHTS
from .statistics import finite, quantile, relative

# Optimizers that divide by the size of past gradients, or take only their sign: scaling all of them changes little.
_NAMES = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Adafactor Lion SparseAdam Muon LAMB"
ADAPTIVE = frozenset(_NAMES.split(" "))
TEST_END, TEST_HEIGHT = "test loss, end over lowest", "test loss, height above the lowest so far"
TEST_FALLS, TRAINED = "test loss, still falling at the end", "training loss, height in the second half"
SPREAD, SHRINK = "gradient norms, spread", "gradients shrink under an optimizer like Adam"
LENGTH = "longest steps, of the weights"
_LEAST_STEPS, _LEAST_POINTS = 40, 5
_PARTS = 20  # means of so many parts of the training loss: single batches are noise
_HALF = 0.5
SHORTEST = 1e-4  # steps below this part of the weights are all short


def score_of(run: Run) -> float:
    """Return what the signs of a run add up to, over the limit: above zero it is one that could be better."""
    values = measure(run)
    kind = kind_of(run, values)
    if not values:
        return -LIMITS[kind]
    return sum(weight * values.get(name, 0.0) for name, weight in WEIGHTS[kind].items()) - LIMITS[kind]


def kind_of(run: Run, values: dict[str, float]) -> str:
    """Return by which of the rules a run with these signs is judged."""
    return "clipped" if is_clipped(run) else "with a test loss" if TEST_END in values else "without"


def measure(run: Run) -> dict[str, float]:
    """Return the signs of a run that are known: logarithms, and none of a run of a few steps."""
    losses, test = finite(run.loss), finite(run.test.values) if run.test is not None else []
    found: dict[str, float] = {}
    if len(run.steps) < _LEAST_STEPS:
        return found
    if len(test) >= _LEAST_POINTS and min(test) > 0:
        found |= _of_test(test)
    if len(losses) >= _LEAST_STEPS and min(losses) > 0:
        means = _means(losses, _PARTS)
        found[TRAINED] = min(5.0, fmean(math.log(v) - math.log(min(means)) for v in means[_PARTS // 2 :]))
    if not is_clipped(run):  # then large ones do no harm
        found |= _of_norms(run)
    if moves := [v for v in finite(run.update) if v > 0]:
        found[LENGTH] = max(0.0, math.log10(quantile(moves, 0.95) / SHORTEST))
    return found


def is_clipped(run: Run) -> bool:
    """Return whether a run is clipped throughout: by a limit that adapts, or by a fixed one, mostly to below half."""
    factors = finite(run.clip)
    return bool(factors) and (run.threshold is None or median(factors) < _HALF)


def _of_test(values: Sequence[float]) -> dict[str, float]:
    lowest, heights = values[0], []
    for value in values[1:]:
        heights.append(max(0.0, math.log(value) - math.log(lowest)))
        lowest = min(lowest, value)
    fifth = max(1, len(values) // 5)
    falls = math.log(fmean(values[-2 * fifth : -fifth])) - math.log(fmean(values[-fifth:]))
    return {
        TEST_END: min(1.0, math.log(end_of(values)) - math.log(lowest)),
        TEST_HEIGHT: min(1.0, fmean(heights)),
        TEST_FALLS: min(1.0, max(0.0, falls)),
    }


def _of_norms(run: Run) -> dict[str, float]:
    over, norms = finite(relative(run.norm, 51)), [n for n in finite(run.norm) if n > 0]
    if len(over) < _LEAST_STEPS:
        return {}
    shrink = math.log(median(norms[:20])) - math.log(median(norms[-20:])) if run.optimizer in ADAPTIVE else 0.0
    return {SPREAD: min(3.0, quantile(over, 0.9) - quantile(over, 0.1)), SHRINK: min(5.0, max(0.0, shrink))}


def end_of(values: Sequence[float]) -> float:
    """Return the mean of the last tenth."""
    return fmean(values[-max(1, len(values) // 10) :])


def _means(values: Sequence[float], parts: int) -> list[float]:
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]
