from statistics import median

from ...run.run import Run
from ..divergence import GROWTH, Divergence, divergence
from ..finding import Chart, Finding
from ..losses import losses_of, swing_of

_FACTOR = 2.0


def rising(run: Run) -> Finding | None:
    """Find a training loss that ends far above its lowest level: the run un-trains, or has diverged."""
    lost = divergence(run)
    if lost is not None:
        return _diverged(run, lost)
    loss = losses_of(run)[-1]
    if not loss.is_long_enough or min(loss.values) <= 0 or swing_of(run, loss) is not None:
        return None
    width = max(8, len(loss.values) // 8)
    starts = [*range(0, len(loss.values) - width, width // 4), len(loss.values) - width]
    windows = [sorted(loss.values[i : i + width]) for i in starts]
    levels = [median(window) for window in windows]
    lowest, last = min(levels), levels[-1]
    where = levels.index(lowest)
    at = starts[where] + width - 1
    # The lowest of many levels is low by chance too: three quarters of the last losses must exceed those around it.
    clear = windows[-1][width // 4] > windows[where][-1 - width // 4]
    if last < _FACTOR * lowest or last < 0.02 * levels[0] or not clear:
        return None
    return Finding(
        name="rising",
        clipping_helps=True,
        title=f"the training loss rises: it ends {last / lowest:.3g} times above the level it had at step "
        f"{loss.steps[at]}",
        weight=0.97,
        criterion=f"the median of the last {width} losses is more than {_FACTOR:g} times the lowest such median, and "
        "three quarters of them exceed three quarters of those it was taken over",
        evidence={"lowest level": lowest, "at step": loss.steps[at], "last level": last, "first level": levels[0]},
        advice="What was learned is being lost: stop at the lowest loss, or lower the learning rate from there on. A "
        "clipped gradient that is weaker than weight decay or momentum has the same effect.",
        chart=Chart("training loss", {"loss": loss.values}, [float(s) for s in loss.steps], [float(loss.steps[at])],
                    log=True),
        plain=f"the training loss falls until step {loss.steps[at]} and then rises again, {last / lowest:.2g}-fold",
    )  # fmt: skip


def _diverged(run: Run, lost: Divergence) -> Finding:
    values = run.loss if lost.what == "training loss" else run.norm
    begins = run.steps[min(lost.at, len(run.steps) - 1)]
    return Finding(
        name="rising",
        clipping_helps=True,
        title=f"the {lost.what} diverges: from {lost.lowest:.3g} at its lowest to {lost.last:.3g} at the end, "
        f"for good from step {begins}",
        weight=0.97,
        criterion=f"the last value is more than {GROWTH:.0e} times the lowest level, however short the run",
        evidence={"lowest level": lost.lowest, "last value": lost.last, "grows from step": begins},
        advice="Every step makes the next one larger: lower the learning rate, or clip, from the start. Nothing after "
        f"step {begins} can be used.",
        chart=Chart(lost.what, {lost.what: values}, [float(s) for s in run.steps], [float(begins)], log=True),
        plain=f"the training diverges: the {lost.what} grows from {lost.lowest:.2g} to {lost.last:.2g}",
    )
