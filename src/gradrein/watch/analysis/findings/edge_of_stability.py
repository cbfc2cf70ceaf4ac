import math
from statistics import fmean, median

from ...run.run import Run
from ..finding import Chart, Finding
from ..statistics import finite, running_median

_LEAST = 40


def edge_of_stability(run: Run) -> Finding | None:
    """Find steps that overshoot the minimum: the next gradient points back along the step just taken.

    On a quadratic of curvature h the cosine settles at half of lr * h, and at lr * h = 2 the steps no longer shrink.
    """
    cosines = finite(run.step_grad_cosine)
    late = cosines[len(cosines) // 2 :]
    share = sum(1 for c in late if c > 0) / max(1, len(late))
    if len(cosines) < _LEAST or share <= 0.5 or fmean(late) <= 0:
        return None
    curvature = _sharpness(run)
    return Finding(
        name="edge_of_stability",
        title=f"the learning rate is too high: {share:.0%} of the steps overshoot, in the second half of the run",
        weight=min(0.89, 0.6 + 0.4 * fmean(late)),
        criterion="cosine between a step and the gradient after it, in the second half of the run: positive in the "
        "mean and for more than half of the steps. Positive: the step went beyond the lowest point in its direction",
        evidence={
            "mean cosine": fmean(late),
            "share of steps that overshoot": share,
            "learning rate (median)": median(finite(run.lr) or [math.nan]),
            **(
                {}
                if curvature is None
                else {"learning rate times curvature along the steps (2 is the edge of stability)": curvature}
            ),
        },
        advice="Shorten the steps. Clipping by norm shortens the longest of them; a smaller learning rate shortens "
        "all; a warm-up helps where only the first ones are too long.",
        plain="the learning rate is too high: steps go past the lowest point and the next ones come back",
        chart=Chart("step against next gradient (running median of the cosine)",
                    {"cosine": running_median(run.step_grad_cosine, 15)}, [float(s) for s in run.steps]),
    )  # fmt: skip


def _sharpness(run: Run) -> float | None:
    """Return learning rate times curvature, of plain SGD: 1 + d.g' / d.d for a step d = -lr g and the next gradient g'.

    The noise of the next batch is independent of the step, so it averages out.
    """
    if run.optimizer != "SGD" or run.settings.get("momentum") or any(c < 1 for c in finite(run.clip)):
        return None
    pairs = zip(run.step_grad_cosine[1:], run.norm[1:], run.norm, strict=False)
    estimates = [1 + c * now / last for c, now, last in pairs if math.isfinite(c * now) and last > 0]
    return median(estimates[len(estimates) // 2 :]) if len(estimates) >= _LEAST else None
