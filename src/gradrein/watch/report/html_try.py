"""The part of the page about several runs of one script."""

from collections.abc import Sequence
from html import escape
from itertools import cycle

from ..analysis.losses import BACKWARD, block_of, levels_of, losses_of
from ..run.curves import Curve
from ..run.run import Run
from . import charts


def side_by_side(labelled: Sequence[tuple[str, Run]]) -> str:
    """Render the losses of labelled runs in one chart for each kind."""
    drawn = ""
    for title, batches in (("Validation or test loss", False), ("Training loss, averaged over 1/40 of the run", True)):
        chosen = [(label, _of_kind(run, batches)) for label, run in labelled]
        series = [
            (label, _points(loss), style)
            for (label, loss), style in zip(chosen, cycle("bacd"), strict=False)
            if loss is not None and loss.values
        ]
        if len(series) > 1:
            log = all(y > 0 for _, points, _ in series for _, y in points)
            drawn += f"<p class=hint>{escape(title)}</p>{charts.lines(series, log=log)}"
    return f"<section><h2>What was tried</h2>{drawn}</section>"


def _of_kind(run: Run, batches: bool) -> Curve | None:
    return next((loss for loss in losses_of(run) if (loss.origin == BACKWARD) == batches), None)


def _points(loss: Curve) -> list[tuple[float, float]]:
    return [(float(loss.steps[i * block_of(loss)]), v) for i, v in enumerate(levels_of(loss))]
