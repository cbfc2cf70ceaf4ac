import math
from itertools import pairwise
from statistics import median

from ...run.run import Run
from ..divergence import divergence
from ..finding import Chart, Finding
from ..losses import is_unsteady
from ..samples import look_first, samples_of
from ..statistics import finite, mad, relative
from .heavy_tail import loss_correlation, what_to_check

_LEAST = 100
_CUTS = [0.6 + 0.01 * i for i in range(39)]  # the second cluster holds 2% to 40% of the steps
_RATIO = 2.5
_SPREADS = 4.0
_VALLEY = 0.3


def cluster(run: Run) -> Finding | None:
    """Find a second kind of batch, whose gradients are several times larger than those of the others."""
    lost = divergence(run)
    end = len(run.steps) if lost is None else lost.at  # what grows without end is no kind of batch
    over, what = relative(run.norm[:end], 101), "gradients"
    found = _split(sorted(finite(over)))
    if found is None and is_unsteady(run):  # noisy norms hide what losses may show
        over, what = relative(run.loss[:end], 101), "losses"
        found = _split(sorted(finite(over)))
    if found is None:
        return None
    limit, ratio = found
    large = {s: r for s, r in zip(run.steps, over, strict=False) if r > limit}
    steps = [*large]
    share = len(steps) / len(finite(over))
    period = _period(steps)
    samples = samples_of(run, large)
    related = loss_correlation(run)
    when = f"every {period} steps" if period else f"steps {', '.join(map(str, steps[:5]))}, ..."
    return Finding(
        name="cluster",
        clipping_helps=True,
        title=f"{share:.0%} of the batches are of another kind: their {what} are {ratio:.3g} times larger",
        weight=0.895,
        criterion="norms, or in a run that swings losses, over their running median (101 steps) fall into two groups "
        f"whose middles are a factor of {_RATIO:g} and {_SPREADS:g} spreads apart, with next to nothing between",
        evidence={
            "share of the steps": share,
            "how much larger": ratio,
            "steps": steps[:20],
            "regular": f"every {period} steps" if period else "no",
            "correlation of a batch's loss and norm (logarithms)": related,
            **samples,
        },
        advice=f"Look at the data of those batches ({when}): corrupt or unscaled rows, a second source, wrong labels. "
        f"Until that is fixed, clip at a norm that suits the other batches. {what_to_check(related)}",
        look=look_first(samples, max(large, key=lambda step: large[step])),
        plain=f"{share:.0%} of the batches have {what} about {ratio:.2g} times larger than the others, as if their "
        "data were corrupt or from elsewhere",
        chart=Chart("gradient norm", {"norm": run.norm}, [float(s) for s in run.steps], log=True),
    )


def _split(ordered: list[float]) -> tuple[float, float] | None:
    """Return where two groups of log ratios part, and how far apart they are as a factor; None where there is one."""
    if len(ordered) < _LEAST:
        return None
    best: tuple[float, float, float] | None = None
    for cut in _CUTS:
        at = int(cut * len(ordered))
        low, high = ordered[:at], ordered[at:]
        if len(high) < 5:
            break
        apart = median(high) - median(low)
        if apart < math.log(_RATIO) or apart < _SPREADS * max(mad(low), mad(high)):
            continue
        middle = (median(high) + median(low)) / 2
        between = sum(1 for r in ordered if abs(r - middle) < apart / 6)
        if between <= _VALLEY * len(high) and (best is None or apart > best[0]):
            best = (apart, middle, math.exp(apart))
    return None if best is None else (best[1], best[2])


def _period(steps: list[int]) -> int | None:
    gaps = [b - a for a, b in pairwise(steps)]
    return gaps[0] if len(gaps) >= 4 and gaps[0] > 1 and sum(g == gaps[0] for g in gaps) > 0.8 * len(gaps) else None
