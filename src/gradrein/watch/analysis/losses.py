"""The losses of a run that are judged, and what their curves do, in words."""

import math
from dataclasses import dataclass
from statistics import fmean

from ..run.run import Run

_LEAST = {True: 40, False: 5}
_TURN = 1.2  # a rise or a fall by less is none
_LEVELS = 40  # what the loss of batches is averaged to


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

    @property
    def levels(self) -> list[float]:
        """The values on other data; of batches some forty averages."""
        return [fmean(self.values[i : i + self.block]) for i in range(0, len(self.values) - self.block + 1, self.block)]

    @property
    def block(self) -> int:
        """How many values a level is the average of."""
        return max(1, len(self.values) // _LEVELS) if self.batches else 1


def losses_of(run: Run) -> list[Loss]:
    """Return the losses on other data, and then that of the batches."""
    found = [_kept(_name(c.name), False, c.steps, c.values, c.origin) for c in run.curves]
    return [*found, _kept("training loss", True, run.steps, run.loss)]


def judged_loss(run: Run) -> Loss:
    """Return the loss that a run is judged by: on other data where that is known, else of the batches."""
    return next(loss for loss in losses_of(run) if loss.is_long_enough or loss.batches)


def rises(levels: list[float]) -> list[float]:
    """Return by what factors a curve above zero rises: each by a fifth or more, after a fall by as much."""
    found: list[float] = []
    low, high, falling = math.inf, 0.0, True
    for v in levels:
        if falling:
            low = min(low, v)
            if v > _TURN * low:
                falling, high = False, v
                found.append(v / low)
        elif v < high / _TURN:
            falling, low = True, v
        else:
            high = max(high, v)
            found[-1] = high / low
    return found


def story_of(loss: Loss) -> str:
    """Say what a loss does over a run, as a clause: up and down, up again, or down."""
    levels = loss.levels
    lowest, last = min(levels), levels[-1]
    ups = rises(levels) if lowest > 0 else []
    ends = f"ends at {last:.3g}"
    if lowest > 0 and last > _TURN * lowest:
        ends += f", {factor(last / lowest)} times its lowest of step {loss.steps[levels.index(lowest) * loss.block]}"
    if len(ups) > 1:
        return f"the {loss.name} goes up and down ({len(ups)} rises, up to {factor(max(ups))}-fold) and {ends}"
    return f"the {loss.name} begins at {levels[0]:.3g} and {ends}"


def factor(value: float) -> str:
    """Format a factor for people."""
    return f"{value:.2g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def _name(curve: str) -> str:
    return f"{curve} loss" if " " not in curve and "_" not in curve else curve


def _kept(name: str, batches: bool, steps: list[int], values: list[float], origin: str = "") -> Loss:
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    return Loss(name, batches, [s for s, _ in pairs], [v for _, v in pairs], origin)
