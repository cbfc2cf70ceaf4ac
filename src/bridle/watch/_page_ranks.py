"""The part of the page about several ranks: how each stood, and how far apart they were."""

from __future__ import annotations

from html import escape

from . import _chart
from ._chart import Line
from ._run import Run
from ._standing import remarks, standing
from ._stats import finite
from ._text import value

__all__ = ["ranks_section"]


def ranks_section(run: Run, label: str) -> str:
    """A table with a row for each rank, the spread of their losses, and what was not in order."""
    if not run.ranks:
        return ""
    rows = standing(run)
    head = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(value(v))}</td>' for v in row.values())}</tr>" for row in rows)
    said = "".join(f"<p class=do>{escape(remark)}</p>" for remark in remarks(run))
    return (
        f"<section><h2>Ranks{', ' + label.lower() if label else ''}</h2>{said}"
        f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
        "<p class=hint>Times are medians of a step. In the backward pass ranks wait for each other.</p>"
        f"{_losses(run)}</section>"
    )


def _losses(run: Run) -> str:
    by_step: dict[int, list[float]] = {}
    for one in run.ranks:
        for step, loss in zip(one.steps, one.loss, strict=True):
            by_step.setdefault(step, []).extend(finite([loss]))
    known = {float(step): losses for step, losses in sorted(by_step.items()) if losses}
    if not known or len(run.ranks) < 2:
        return ""
    series = [
        Line("highest of the ranks", [(step, max(losses)) for step, losses in known.items()], "b"),
        Line("lowest", [(step, min(losses)) for step, losses in known.items()], "a"),
    ]
    log = all(min(losses) > 0 for losses in known.values())
    return f"<p class=hint>Loss, over all ranks: each has data of its own.</p>{_chart.lines(series, log=log)}"
