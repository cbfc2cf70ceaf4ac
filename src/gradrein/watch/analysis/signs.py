"""Whether a run could be better: a few plain numbers, weighed by what would have helped other runs.

Weights, the sum from which a report speaks, and what to advise then are in `calibrated.py`, which `make calibrate`
writes from random training runs.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean, median

from ..run.run import Run
from .calibrated import LIMIT, STARTS, WEIGHTS
from .statistics import finite, late_fall

# Optimizers that divide by the size of past gradients, or take only their sign: scaling all of them changes little.
_NAMES = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Adafactor Lion SparseAdam Muon LAMB"
ADAPTIVE = frozenset(_NAMES.split(" "))
TEST_END, TEST_HEIGHT = "test loss, end over lowest", "test loss, height above the lowest so far"
TEST_FALLS, TRAINED = "test loss, still falling at the end", "training loss, height above the lowest so far"
LEARNED, LARGEST = "training loss, first over lowest", "largest gradient norm over the median"
SHRINK, LONGEST, PATH = "gradient norm, first over last", "longest step, of the weights", "all steps, of the weights"
SUM = "weighted sum over its limit"
_LEAST_STEPS, _LEAST_POINTS = 40, 5
_PARTS = 10  # means of so many parts of the training loss: single batches are noise
_LONG = 1000  # steps of the longest runs that the rules are fitted to: of more, so many count
_HALF = 0.5
LR_SCALE = "lr-scale"
"""The note in a record that learning rates were scaled."""
SHORT = 0.05  # steps below this part of the weights are all short


def score_of(run: Run) -> float:
    """Return what the signs of a run add up to, over the limit: above zero it is one that could be better."""
    values, rule = measure(run), rule_of(run)
    if not values:
        return -math.inf
    return STARTS[rule] + sum(w * values.get(name, 0.0) for name, w in WEIGHTS[rule].items()) - LIMIT


def rule_of(run: Run) -> str:
    """Return by which of the rules a run is judged."""
    if follows_advice(run):
        return "followed"
    kind = "adaptive" if run.optimizer in ADAPTIVE else "plain"
    return f"{kind}, test loss" if _tests(run) else kind


def measure(run: Run) -> dict[str, float]:
    """Return the signs of a run that are known: logarithms, and none of a run of a few steps."""
    losses, test, values = finite(run.loss), _tests(run), dict[str, float]()
    if len(run.steps) < _LEAST_STEPS:
        return values
    if test:
        values |= _of_test(test)
    if len(losses) >= _LEAST_STEPS and min(losses) > 0:
        parts = [math.log(v) for v in means(losses, _PARTS)]
        values[TRAINED] = min(5.0, fmean(heights(parts)))
        values[LEARNED] = min(8.0, parts[0] - min(parts))
    norms = [n for n in finite(run.norm) if n > 0]
    if not is_clipped(run) and len(norms) >= _LEAST_STEPS:  # else large ones do no harm
        values[LARGEST] = min(8.0, math.log(max(norms)) - math.log(median(norms)))
        values[SHRINK] = max(-5.0, min(5.0, math.log(median(norms[:20])) - math.log(median(norms[-20:]))))
    if moves := [v for v in finite(run.update) if v > 0]:
        values[LONGEST] = max(0.0, math.log10(max(moves) / SHORT))
        values[PATH] = min(1.3, math.log10(sum(moves) * min(1.0, _LONG / len(moves))))
    return values


def is_clipped(run: Run) -> bool:
    """Return whether a run is clipped throughout: by a limit that adapts, or by a fixed one, mostly to below half."""
    factors = finite(run.clip)
    return bool(factors) and (run.threshold is None or median(factors) < _HALF)


def follows_advice(run: Run) -> bool:
    """Return whether a run does what reports advise: it is clipped throughout, or was started with `--lr-scale`."""
    return is_clipped(run) or any(note.get("note") == LR_SCALE for note in run.notes)


def _tests(run: Run) -> list[float]:
    """Return the test loss, where it is known well enough; else nothing."""
    values = finite(run.test.values) if run.test is not None else []
    return values if len(values) >= _LEAST_POINTS and min(values) > 0 else []


def _of_test(values: Sequence[float]) -> dict[str, float]:
    logs = [math.log(value) for value in values]
    return {
        TEST_END: min(1.5, math.log(end_of(values)) - min(logs)),
        TEST_HEIGHT: min(1.5, fmean(heights(logs))),
        TEST_FALLS: min(1.0, max(0.0, late_fall(values))),
    }


def heights(values: Sequence[float]) -> list[float]:
    """Return how far each value but the first is above the lowest before it."""
    return [max(0.0, v - low) for v, low in zip(values[1:], accumulate(values, min), strict=False)]


def end_of(values: Sequence[float]) -> float:
    """Return the mean of the last tenth."""
    return fmean(values[-max(1, len(values) // 10) :])


def means(values: Sequence[float], parts: int) -> list[float]:
    """Return the means of so many equal parts; nothing of fewer values."""
    if len(values) < parts:
        return []
    edges = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]
