"""What a notebook shows of a run."""

from ..._notebook import card, curves
from .report import Report
from .text import to_text


def monitor_html(report: Report) -> str:
    """Draw loss and gradient norm, with the text of the report."""
    run = report.run
    columns = (("loss", run.loss), ("gradient norm", run.norm))
    picture = curves([(name, [*zip(map(float, run.steps), column, strict=True)]) for name, column in columns])
    return card(f"{run.optimizer}, {sum(run.n_steps)} steps", picture, to_text(report))
