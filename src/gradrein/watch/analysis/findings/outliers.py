import math
from itertools import pairwise
from typing import Any

from ...run.run import Run
from ..divergence import divergence
from ..finding import Chart, Finding
from ..losses import factor
from ..samples import look_first, samples_of
from ..statistics import finite, relative, slope

_LEAST = 50
_TIMES = 3.0  # so much above its running median a gradient norm stands out


def outliers(run: Run) -> Finding | None:
    """Find batches whose gradients are far larger than those around them, and which samples were in them."""
    lost = divergence(run)
    end = len(run.steps) if lost is None else lost[2]  # what grows without end is no single batch
    over = relative(run.peak[:end], 51)
    known = finite(over)
    large = {s: r for s, r in zip(run.steps, over, strict=False) if r > math.log(_TIMES)}
    if len(known) < _LEAST or not large:
        return None
    share = sum(map(math.exp, large.values())) / sum(map(math.exp, known))
    if share < 2 * len(large) / len(known) or 100 * len(large) < len(known):  # a few in ten thousand explain nothing
        return None
    worst = max(large, key=lambda step: large[step])
    most, regular, related = math.exp(large[worst]), _period([*large]), loss_correlation(run)
    samples: dict[str, Any] = samples_of(run, large)
    batches = f"{len(large)} of {len(known)} batches"
    return Finding(
        name="outliers",
        title=f"{batches} have gradients more than {_TIMES:g} times larger than those around them, up to "
        f"{factor(most)} times (step {worst})" + (f"; every {regular} steps" if regular else ""),
        weight=min(0.9, 0.6 + share),
        criterion=f"gradient norm above {_TIMES:g} times its running median (51 steps), in at least one step of a "
        "hundred",
        evidence={
            "steps": [*large][:20],
            "share of the sum of norms, each over its running median": share,
            "largest, over its surroundings": most,
            "module with the largest gradient there": _module(run, run.steps.index(worst)),
            "regular": f"every {regular} steps" if regular else "no",
            "correlation of a batch's loss and norm (logarithms)": related,
            **samples,
        },
        advice="This is what clipping by norm is for. "
        + (
            "These batches have a large loss too, so look at how the loss weights single samples: a power above 1, a "
            "class weight, a logarithm near zero, a target or an input far outside the others."
            if related > 0
            else "The loss of these batches is not larger: look at their inputs (scale, length, padding), and at "
            "recurrent or attention layers that amplify them."
        ),
        look=look_first(samples, worst),
        plain=f"{batches} have far larger gradients than those around them (up to {factor(most)} times)",
        chart=Chart("gradient norm", {"norm": run.norm}, [float(s) for s in run.steps], [float(s) for s in large],
                    log=True),
    )  # fmt: skip


def _module(run: Run, at: int) -> str:
    squares: dict[str, float] = {}
    for name, norm in zip(run.names, run.norms[at], strict=True):
        module = name.rpartition(".")[0] or name
        squares[module] = squares.get(module, 0.0) + (norm or 0.0) ** 2
    return max(squares, key=lambda m: squares[m], default="unknown")


def _period(steps: list[int]) -> int | None:
    gaps = [b - a for a, b in pairwise(steps)]
    return gaps[0] if len(gaps) >= 4 and gaps[0] > 1 and sum(g == gaps[0] for g in gaps) > 0.8 * len(gaps) else None


def loss_correlation(run: Run) -> float:
    """Return how closely the norm of a batch follows its loss, both over their running medians."""
    pairs = zip(relative(run.loss, 51), relative(run.norm, 51), strict=True)
    known = [(a, b) for a, b in pairs if math.isfinite(a + b)]
    return slope([a for a, _ in known], [b for _, b in known])[1] if len(known) >= _LEAST else math.nan
