"""The part of the page about several ranks."""

from html import escape

from ..analysis.statistics import finite
from ..run.run import Run
from . import charts
from .charts import Line
from .report import Report
from .text import value


def ranks_section(report: Report, label: str) -> str:
    """Render a table with a row for each rank, the range of their losses, and what was not in order."""
    if not report.run.ranks:
        return ""
    rows = report.rank_table
    head = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(value(v))}</td>' for v in row.values())}</tr>" for row in rows)
    warnings = "".join(f"<p class=do>{escape(warning)}</p>" for warning in report.warnings)
    return (
        f"<section><h2>Ranks{', ' + label.lower() if label else ''}</h2>{warnings}"
        f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
        "<p class=hint>Times are medians of a step. In the backward pass ranks wait for each other.</p>"
        f"{_losses(report.run)}</section>"
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
    return f"<p class=hint>Loss, over all ranks: each has data of its own.</p>{charts.lines(series, log=log)}"
