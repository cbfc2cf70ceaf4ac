import math
from itertools import pairwise
from statistics import fmean, stdev

from ...run.run import Run
from ..finding import Chart, Finding
from ..statistics import autocorrelation, finite, relative

_LEAST = 60  # steps, to look for a period at all
_BLOCK = 20  # steps in a stretch, at least
_RISE = 1.5  # how much the loss of a stretch of steps rises over the one before to count as a swing
_RISES, _CLIMB = 2, 4.0  # so many of them, that climb by so much together
_CORRELATION = 0.4
_AMPLITUDE = 0.1


def oscillation(run: Run) -> Finding | None:
    """Find a loss that goes up and down instead of down."""
    pairs = [(s, v) for s, v in zip(run.steps, run.loss, strict=True) if math.isfinite(v)]
    loss = [v for _, v in pairs]
    if len(loss) < _LEAST or min(loss) <= 0:
        return None
    block = max(_BLOCK, len(loss) // 40)
    blocks = [loss[i : i + block] for i in range(0, len(loss) - block + 1, block)]
    levels = [fmean(part) for part in blocks]
    # Far below where it began, the loss of single batches varies by factors and nothing is wrong.
    floor = 0.01 * max(levels[:3])
    rises = [
        fmean(late) / fmean(early)
        for early, late in pairwise(blocks)
        if fmean(late) > max(floor, _RISE * fmean(early), fmean(early) + 3 * _error(early, late))
    ]
    residue = [0.0 if math.isnan(r) else r for r in relative(loss, max(11, len(loss) // 6) | 1)]
    period, strength = _period(residue)
    periodic = period is not None and stdev(residue) > _AMPLITUDE
    climb = math.prod(rises)
    if (len(rises) < _RISES or climb < _CLIMB) and not periodic:
        return None
    third = len(residue) // 3
    early, late = stdev(residue[:third]), stdev(residue[-third:])
    growth = late / early if early > 0 else math.inf
    evidence: dict[str, object] = {
        "swing (90% of steps lie within a factor of)": math.exp(_range(residue)),
        f"rises by more than {_RISE} from one stretch of {block} steps to the next": len(rises),
        "largest rise": max(rises, default=1.0),
        "all rises together": climb,
        "period in steps": period if periodic else "none: the swings are irregular",
        "growth of the amplitude, last third over first": growth,
    }
    if periodic:
        evidence["correlation at that period"] = strength
    kind = f"with a period of {period} steps" if periodic else f"{len(rises)} times by more than {_RISE}x"
    grows = ", and the swing grows" if growth > 1.5 else ", and the swing shrinks" if growth < 0.67 else ""
    advice = (
        "Look at what explains it below or above: a learning rate at the edge, a heavy tail, spikes. Clipping by norm "
        "limits what one step can do; see the advice for a threshold."
    )
    if periodic:
        advice += (
            " If the period is the number of batches in an epoch, it is the order of the data that you see: shuffle."
        )
    return Finding(
        name="oscillation",
        clipping_helps=True,
        title=f"the loss swings {kind}{grows}",
        weight=min(0.95, 0.7 + 0.02 * len(rises) + (0.1 if growth > 1.5 else 0.0)),
        test=f"mean loss of {len(levels)} stretches rises at least {_RISES} times by {_RISE}x and by 3 standard "
        f"errors, {_CLIMB:g}x in all; or the loss over its running median repeats itself (correlation above "
        f"{_CORRELATION} at some lag, amplitude above {_AMPLITUDE})",
        evidence=evidence,
        advice=advice,
        chart=Chart("mean loss of each stretch", {"loss": levels}, [pairs[i * block][0] for i in range(len(levels))]),
    )


def _error(early: list[float], late: list[float]) -> float:
    """Return the standard error of the difference of two means: batches differ, and that alone is no swing."""
    return math.hypot(stdev(early), stdev(late)) / math.sqrt(len(early))


def _range(residue: list[float]) -> float:
    ordered = sorted(finite(residue))
    return ordered[int(0.95 * (len(ordered) - 1))] - ordered[int(0.05 * (len(ordered) - 1))]


def _period(residue: list[float]) -> tuple[int | None, float]:
    """Return the lag after the first dip with the largest autocorrelation, if that is large enough."""
    top = min(len(residue) // 4, 400)
    correlations = [autocorrelation(residue, lag) for lag in range(1, top + 1)]
    dip = next((i for i, c in enumerate(correlations) if c < -0.2), None)
    if dip is None:
        return None, 0.0
    needed = max(_CORRELATION, 4 / math.sqrt(len(residue)))
    strongest = max(correlations[dip:])
    if strongest < needed:
        return None, 0.0
    # Every multiple of a period repeats as well, some of them better by chance: the first good one is meant.
    near = next(i for i in range(dip, len(correlations)) if correlations[i] > max(needed, 0.8 * strongest))
    while near + 1 < len(correlations) and correlations[near + 1] > correlations[near]:
        near += 1
    return near + 1, correlations[near]
