"""The part of the page about several runs of one script."""

from collections.abc import Sequence
from html import escape
from itertools import cycle

from ..analysis.losses import Loss, losses_of
from ..run.run import Run
from . import charts
from .charts import Line


def side_by_side(labelled: Sequence[tuple[str, Run]]) -> str:
    """Render the losses of labelled runs in one chart for each kind."""
    found = ""
    for title, batches in (("Validation or test loss", False), ("Training loss, averaged over 1/40 of the run", True)):
        chosen = [(label, _of_kind(run, batches)) for label, run in labelled]
        series = [
            Line(label, _points(loss), style, dots=not batches)
            for (label, loss), style in zip(chosen, cycle("bacd"), strict=False)
            if loss is not None and loss.values
        ]
        if len(series) > 1:
            log = all(y > 0 for one in series for _, y in one.points)
            found += f"<p class=hint>{escape(title)}</p>{charts.lines(series, log=log)}"
    return f"<section><h2>What was tried</h2>{found}</section>"


def _of_kind(run: Run, batches: bool) -> Loss | None:
    return next((loss for loss in losses_of(run) if loss.batches == batches), None)


def _points(loss: Loss) -> list[tuple[float, float]]:
    return [(float(loss.steps[i * loss.block]), v) for i, v in enumerate(loss.levels)]
