"""The losses of a run that are judged: that of the batches, and those on other data."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from statistics import median

from ..run.run import Run
from .statistics import finite
from .swing import Explain, Swing, find_swing

_RAISED = 1.2  # a learning rate that grew by so much explains a rise
_LEAST = {True: 40, False: 5}


@dataclass(frozen=True)
class Loss:
    """One loss.

    Attributes:
        name: What to call it in a sentence.
        batches: Whether it is that of single batches.
        steps: The step of each value.
        values: The values, all finite.
        origin: Where a loss on other data was read.
    """

    name: str
    batches: bool
    steps: list[int]
    values: list[float]
    origin: str = ""

    @property
    def is_long_enough(self) -> bool:
        """Whether there are enough values to judge."""
        return len(self.values) >= _LEAST[self.batches]

    def level(self, at: int) -> float:
        """Return the level that ends at an index (negative: from the end): a median of batches, else the value."""
        end = at % len(self.values) + 1
        width = min(25, max(5, len(self.values) // 10)) if self.batches else 1
        return median(self.values[max(0, end - width) : end])


def losses_of(run: Run) -> list[Loss]:
    """Return the losses on other data, and then that of the batches."""
    found = [_kept(_name(c.name), False, c.steps, c.values, c.origin) for c in run.curves]
    return [*found, _kept("training loss", True, run.steps, run.loss)]


def swing_of(run: Run, loss: Loss) -> Swing | None:
    """Return whether a loss of a run swings, beyond what its schedule or its data explain."""
    if not loss.is_long_enough:
        return None
    return find_swing(loss.values, batches=loss.batches, explained=_explained(run, loss))


def is_unsteady(run: Run) -> bool:
    """Return whether a loss of a run swings, or gradients were not finite."""
    return bool(run.nonfinite) or any(swing_of(run, loss) for loss in losses_of(run))


def _name(curve: str) -> str:
    return f"{curve} loss" if " " not in curve and "_" not in curve else curve


def _kept(name: str, batches: bool, steps: list[int], values: list[float], origin: str = "") -> Loss:
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    return Loss(name, batches, [s for s, _ in pairs], [v for _, v in pairs], origin)


def _explained(run: Run, loss: Loss) -> Explain:
    def row(index: int) -> int:
        # A loss on other data came after so many steps: the last of them has the number before.
        place = bisect_right if loss.batches else bisect_left
        return max(0, place(run.steps, loss.steps[index]) - 1)

    def explained(start: int, end: int) -> str | None:
        before, after = row(start), row(end)
        if _is_raised(finite(run.lr[before : after + 1])):
            return "schedule"
        return "data" if loss.batches and _is_new_data(run, before, after) else None

    return explained


def _is_raised(rates: list[float]) -> bool:
    lowest = math.inf
    for rate in rates:
        lowest = min(lowest, rate)
        if rate > _RAISED * lowest:
            return True
    return False


def _is_new_data(run: Run, before: int, after: int) -> bool:
    """Return whether the loss jumped from one batch to the next for good, after steps no larger than usual."""
    around = 9
    loss = run.loss
    if after - before < 1 or before < around or not all(map(math.isfinite, loss[before - around : after + 1])):
        return False
    whole = max(loss[before : after + 1]) - min(loss[before : after + 1])

    def jump(t: int) -> float:
        return min(loss[t : min(t + 3, after + 1)]) - max(loss[max(before, t - 3) : t])

    at = max(range(before + 1, after + 1), key=jump)
    usual = median(finite(run.update[max(0, at - 60) : at - 3]) or [math.inf])
    last = max(finite(run.update[max(0, at - 3) : at]), default=math.inf)
    return jump(at) > 0.5 * whole and last < 1.5 * usual
