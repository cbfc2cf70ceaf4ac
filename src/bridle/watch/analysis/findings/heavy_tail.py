import math

from ...run.run import Run
from ..finding import Chart, Finding
from ..statistics import hill, quantile, relative

_LEAST = 100
_INDEX = 3.0
_SHARE = 0.2


def heavy_tail(run: Run) -> Finding | None:
    """Find gradients that are far larger in a few steps, beyond what the trend explains."""
    over = sorted(math.exp(r) for r in relative(run.norm, 101) if not math.isnan(r))
    if len(over) < _LEAST:
        return None
    few = max(5, len(over) // 20)
    share = sum(over[-few:]) / sum(over)
    index = hill(over, max(10, len(over) // 20))
    if index > _INDEX or share < _SHARE:
        return None
    return Finding(
        name="heavy_tail",
        clipping_helps=True,
        title=f"gradients are heavy-tailed: {few} of {len(over)} steps make {share:.0%} of the total",
        weight=min(0.9, 0.5 + share),
        test=f"gradient norm over its running median (101 steps): the largest 5% make more than {_SHARE:.0%} of "
        f"the sum, and Hill's tail index over them is below {_INDEX:g} (of a normal distribution it is 10 and more)",
        evidence={
            "share of the sum from the largest 5% of steps": share,
            "tail index": index,
            "largest norm over its running median": over[-1],
            "99th percentile over median": quantile(over, 0.99) / quantile(over, 0.5),
        },
        advice="This is what clipping by norm is for: see the advice for a threshold. In the loss, look for what makes "
        "single samples weigh so much: a power, a weight, a logarithm near zero.",
        chart=Chart("gradient norm over its running median, steps sorted", {"ratio": over},
            [100 * i / len(over) for i in range(len(over))], log=True, x_label="% of steps"),
    )  # fmt: skip
