"""The losses of a run that are judged, and what their curves do, in words."""

import math
from itertools import pairwise
from statistics import fmean, stdev

from ..run.curves import Curve
from ..run.run import Run
from .statistics import late_fall

_LEAST, _LEAST_BATCHES = 5, 40
_TURN = 1.2  # a rise or a fall by less is none
_FALLS = math.log(1.1)
_LEVELS = 40  # what the loss of batches is averaged to


BACKWARD = "backward passes"
"""Where the loss of single batches comes from."""


def losses_of(run: Run) -> list[Curve]:
    """Return the losses on other data, and then that of the batches; of each what is finite."""
    others = [_finite(Curve(_name(c.name), c.origin, c.steps, c.values)) for c in run.curves]
    return [*others, _finite(Curve("training loss", BACKWARD, run.steps, run.loss))]


def judged_loss(run: Run) -> Curve:
    """Return the loss that a run is judged by: on other data where that is known, else of the batches."""
    return next(loss for loss in losses_of(run) if is_long_enough(loss) or loss.origin == BACKWARD)


def is_long_enough(loss: Curve) -> bool:
    """Return whether there are enough values to judge."""
    return len(loss) >= (_LEAST_BATCHES if loss.origin == BACKWARD else _LEAST)


def block_of(loss: Curve) -> int:
    """Return how many values a level is the average of."""
    return max(1, len(loss) // _LEVELS) if loss.origin == BACKWARD else 1


def levels_of(loss: Curve, until: float = math.inf) -> list[float]:
    """Return the values on other data, and of batches some forty averages; up to a step."""
    kept = [v for s, v in zip(loss.steps, loss.values, strict=True) if s <= until]
    block = block_of(loss)
    return [fmean(kept[i : i + block]) for i in range(0, len(kept) - block + 1, block)]


def rises(levels: list[float]) -> list[float]:
    """Return by what factors a curve above zero rises: each by a fifth or more, after a fall by as much."""
    factors: list[float] = []
    low, high, falling = math.inf, 0.0, True
    for v in levels:
        if falling:
            low = min(low, v)
            if v > _TURN * low:
                falling, high = False, v
                factors.append(v / low)
        elif v < high / _TURN:
            falling, low = True, v
        else:
            high = max(high, v)
            factors[-1] = high / low
    return factors


def still_falls(loss: Curve) -> bool:
    """Return whether a loss falls to its end: its last fifth is a tenth below the fifth before, beyond its noise.

    The noise of the difference of both means is estimated from the changes from value to value. A loss that goes up
    and down, or ends above its lowest, is none that falls.
    """
    levels = levels_of(loss)
    n = len(levels) // 5
    if n < 2 or levels[-1] > _TURN * min(levels) or min(levels) <= 0 or len(rises(levels)) > 1:
        return False
    changes = [math.log(b / a) for a, b in pairwise(levels[-2 * n :])]
    return late_fall(levels) > max(_FALLS, 2 * stdev(changes) / math.sqrt(n))


def story_of(loss: Curve) -> str:
    """Say what a loss does over a run, as a clause: up and down, up again, or down."""
    levels = levels_of(loss)
    lowest, last = min(levels), levels[-1]
    ups = rises(levels) if lowest > 0 else []
    ends = f"ends at {last:.3g}"
    if lowest > 0 and last > _TURN * lowest:
        ends += (
            f", {factor(last / lowest)} times its lowest of step {loss.steps[levels.index(lowest) * block_of(loss)]}"
        )
    if len(ups) > 1:
        return f"the {loss.name} goes up and down ({len(ups)} rises, up to {factor(max(ups))}-fold) and {ends}"
    return f"the {loss.name} begins at {levels[0]:.3g} and {ends}" + (", still falling" if still_falls(loss) else "")


def factor(value: float) -> str:
    """Format a factor for people."""
    return f"{value:.2g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def _name(curve: str) -> str:
    return f"{curve} loss" if " " not in curve and "_" not in curve else curve


def _finite(curve: Curve) -> Curve:
    pairs = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if math.isfinite(v)]
    return Curve(curve.name, curve.origin, [s for s, _ in pairs], [v for _, v in pairs])
