"""What a notebook shows of a run and of its findings."""

from ..._notebook import Curve, card, curves
from ..analysis.finding import Finding
from .report import Report
from .text import to_text


class Findings(list[Finding]):
    """A list of findings that a notebook draws."""

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() for one in self) or card("No findings.")


def monitor_html(report: Report) -> str:
    """Draw loss and gradient norm, with the text of the report."""
    run = report.run
    columns = (("loss", run.loss), ("gradient norm", run.norm))
    picture = curves([Curve(name, [*zip(map(float, run.steps), column, strict=True)]) for name, column in columns])
    return card(f"{run.optimizer}, {sum(run.n_steps)} steps", picture, to_text(report))
