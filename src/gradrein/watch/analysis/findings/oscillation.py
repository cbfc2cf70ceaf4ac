import math
from itertools import pairwise
from statistics import median

from ...run.run import Run
from ..finding import Chart, Finding
from ..losses import Loss, losses_of, swing_of
from ..swing import Rise, Swing
from .overfitting import overfits


def oscillation(run: Run) -> Finding | None:
    """Find a loss that goes up and down instead of down: on other data, or of the batches."""
    found = [(loss, swing) for loss in losses_of(run) if (swing := swing_of(run, loss)) is not None]
    if not found:
        return None
    loss, swing = found[0]
    rises = swing.rises
    largest = max(_size(loss, r) for r in rises)
    ends = _end(loss)
    also = [other.name for other, _ in found[1:]]
    period = _period(loss, rises)
    positive = min(loss.values) > 0
    trained = losses_of(run)[-1]
    # Of a loss on other data a part may be that: the training loss does not swing, and falls meanwhile.
    overfitted = None if loss.batches or trained.name in also else overfits(loss, trained)
    title = f"the {' and the '.join([loss.name, *also[:1]])} swing{'' if also else 's'}: {len(rises)} rises"
    title += f", the largest {largest:.3g}-fold" if positive else f", the largest by {largest:.3g}"
    return Finding(
        name="oscillation",
        clipping_helps=True,
        title=title + (f"; it ends {ends:.3g} times above its lowest" if ends > 1.2 else ""),
        weight=0.9 + 0.01 * min(len(rises), 5) + 0.03 * min(1.0, math.log10(1 + largest) / 3),
        criterion="the loss rises, falls and rises again, each time by more than 20% and by more than its noise "
        "explains; a rise while the learning rate is raised, or when new data comes, does not count",
        evidence={
            "where the loss was seen": loss.origin or "backward passes",
            "rises": len(rises),
            "largest rise": largest,
            "swings since step": loss.steps[swing.since],
            "smoothed over (values)": swing.width,
            "last over lowest": ends,
            "period in steps": period if period is not None else "none: the swings are irregular",
            **({"also swings": also} if also else {}),
        },
        advice="The causes that were found are listed with this finding. If there is none: halve the learning rate, "
        "or clip by norm, which limits the effect of one step."
        + (" Where two optimizers work against each other, as in a GAN, their losses need not settle: judge by what is "
           "generated." if run.n_optimizers > 1 else "")
        + (" If the period is the number of batches in an epoch, it may be the order of the data: shuffle."
           if period is not None and loss.batches else "")
        + (f" The training loss falls meanwhile, so a part of this is overfitting. {overfitted.advice}"
           if overfitted is not None else ""),
        chart=_chart(loss, swing),
        plain=f"the {loss.name} goes up and down instead of settling ({len(rises)} rises"
        + (f", up to {_fold(largest)} times its level)" if positive else ")")
        + ("" if overfitted is None else " while the training loss falls, so a part of it is overfitting"),
    )  # fmt: skip


def _fold(factor: float) -> str:
    return f"{factor:.2g}" if factor < 100 else f"{factor:.0f}" if factor < 1e5 else f"{factor:.0e}"


def _size(loss: Loss, rise: Rise) -> float:
    """Return a rise as a factor; as a difference where the loss is not positive."""
    return rise.high / rise.low if min(loss.values) > 0 and rise.low > 0 else rise.high - rise.low


def _end(loss: Loss) -> float:
    """Return the last level over the lowest; 1 where that has no meaning."""
    levels = [loss.level(i) for i in range(len(loss.values))]
    return levels[-1] / min(levels) if min(levels) > 0 else 1.0


def _period(loss: Loss, rises: list[Rise]) -> int | None:
    """Return the distance between peaks, where it is nearly always the same."""
    gaps = [loss.steps[b.high_at] - loss.steps[a.high_at] for a, b in pairwise(rises)]
    usual = median(gaps) if len(gaps) >= 3 else 0
    alike = sum(1 for gap in gaps if abs(gap - usual) <= max(1, 0.2 * usual))
    return round(usual) if usual and alike >= 0.8 * len(gaps) else None


def _chart(loss: Loss, swing: Swing) -> Chart:
    peaks = [float(loss.steps[r.high_at]) for r in swing.rises]
    xs = [float(s) for s in loss.steps]
    return Chart(f"{loss.name}; the lines are peaks", {loss.name: loss.values}, xs, peaks, log=min(loss.values) > 0)
