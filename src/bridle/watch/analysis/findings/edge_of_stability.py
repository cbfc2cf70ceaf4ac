from statistics import fmean, median

from ...run.run import Run
from ..finding import Chart, Finding
from ..statistics import finite, running_median

_LEAST = 40
_COSINE = 0.25
_SHARE = 0.65


def edge_of_stability(run: Run) -> Finding | None:
    """Find steps that overshoot the minimum: the next gradient points back along the step just taken.

    On a quadratic of curvature h the cosine settles at half of lr * h, and at lr * h = 2 the steps no longer shrink.
    """
    second_half = finite(run.step_grad_cosine[len(run.step_grad_cosine) // 2 :])
    if len(second_half) < _LEAST:
        return None
    cosine, share = fmean(second_half), sum(1 for t in second_half if t > 0) / len(second_half)
    if cosine < _COSINE or share < _SHARE:
        return None
    lr = median(finite(run.lr)) if finite(run.lr) else float("nan")
    return Finding(
        name="edge_of_stability",
        clipping_helps=True,
        title=f"the learning rate is at the edge of stability: {share:.0%} of the steps overshoot",
        weight=min(0.99, 0.6 + 0.4 * cosine),
        test=f"cosine between a step and the gradient after it, second half of the run: mean above {_COSINE}, "
        f"and positive for more than {_SHARE:.0%} of the steps",
        evidence={"mean cosine": cosine, "share of steps that overshoot": share, "learning rate (median)": lr},
        advice=f"Lower the learning rate: {lr / 2:.3g} first (half), {lr / 4:.3g} if it still overshoots; or "
        "warm it up. Clipping hides this more than it cures it.",
        chart=Chart("step against next gradient (running median of the cosine)",
                        {"cosine": running_median(run.step_grad_cosine, 15)}, [float(s) for s in run.steps]),
    )  # fmt: skip
