import math
from statistics import median

from ...run.run import Run
from ..finding import Chart, Finding
from ..losses import is_unsteady
from ..statistics import finite, running_median

_WINDOW = 40
_COSINE = 0.25
_SHARE = 0.65
_SHORTEN = "Shorten the steps."
_CALM = "Nothing has to change while the loss falls. Where it stalls, shorten the steps."


def edge_of_stability(run: Run) -> Finding | None:
    """Find steps that overshoot the minimum: the next gradient points back along the step just taken.

    On a quadratic of curvature h the cosine settles at half of lr * h, and at lr * h = 2 the steps no longer shrink.
    """
    known = [(i, c) for i, c in enumerate(run.step_grad_cosine) if math.isfinite(c)][10:]
    # Where nothing swings, overshooting for a while after a restart or a warm-up does no harm.
    unsteady = is_unsteady(run)
    width = _WINDOW if unsteady else max(_WINDOW, len(known) // 2)
    worst = _worst_window([c for _, c in known], width)
    if worst is None:
        return None
    at, cosine, share = worst
    lr = median(finite(run.lr)) if finite(run.lr) else float("nan")
    curvature = _sharpness(run)
    sharpness = (
        {} if curvature is None else {"learning rate times curvature along the steps (2 is the edge)": curvature}
    )
    return Finding(
        name="edge_of_stability",
        clipping_helps=True,
        title=f"the learning rate is at the edge of stability: {share:.0%} of the steps overshoot around step "
        f"{run.steps[known[at][0]]}",
        weight=min(0.89, 0.6 + 0.4 * cosine),
        criterion=f"cosine between a step and the gradient after it, over {_WINDOW} steps in a row (half of the run "
        "where nothing swings): mean above "
        f"{_COSINE}, and positive for more than {_SHARE:.0%}. Positive: the step went beyond the lowest point in its "
        "direction",
        evidence={
            "mean cosine": cosine,
            "share of steps that overshoot": share,
            "learning rate (median)": lr,
            **sharpness,
        },
        advice=f"{_SHORTEN if unsteady else _CALM} Clipping by norm shortens the longest of them; a smaller learning "
        "rate shortens all; a warm-up helps where only the first ones are too long.",
        plain=f"the learning rate is {'too high' if unsteady else 'at its upper limit'}: steps go past the "
        "lowest point and the next ones come back",
        chart=Chart("step against next gradient (running median of the cosine)",
                        {"cosine": running_median(run.step_grad_cosine, 15)}, [float(s) for s in run.steps]),
    )  # fmt: skip


def _worst_window(cosines: list[float], width: int) -> tuple[int, float, float] | None:
    """Return the middle, mean and share above 0 of the window with the largest mean, if it is large enough."""
    best: tuple[int, float, float] | None = None
    total, above = sum(cosines[:width]), sum(1 for c in cosines[:width] if c > 0)
    for end in range(width, len(cosines) + 1):
        mean, share = total / width, above / width
        if mean > _COSINE and share > _SHARE and (best is None or mean > best[1]):
            best = (end - width // 2, mean, share)
        if end < len(cosines):
            total += cosines[end] - cosines[end - width]
            above += (cosines[end] > 0) - (cosines[end - width] > 0)
    return best


def _sharpness(run: Run) -> float | None:
    """Return learning rate times curvature, of plain SGD: 1 + d.g' / d.d for a step d = -lr g and the next gradient g'.

    The noise of the next batch is independent of the step, so it averages out.
    """
    if run.optimizer != "SGD" or run.settings.get("momentum") or any(c < 1 for c in finite(run.clip)):
        return None
    pairs = zip(run.step_grad_cosine[1:], run.norm[1:], run.norm, strict=False)
    found = [1 + c * now / last for c, now, last in pairs if math.isfinite(c * now) and last > 0]
    return median(found[len(found) // 2 :]) if len(found) >= _WINDOW else None
