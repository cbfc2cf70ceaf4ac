"""What a finding is."""

from dataclasses import dataclass, field
from typing import Any

from ..._notebook import card, curves


@dataclass(frozen=True)
class Chart:
    """A chart for a finding: lines over steps.

    Attributes:
        title: What the chart shows.
        lines: Series by name, over `x`.
        x: The steps.
        marks: Values of x to mark with a vertical line.
        log: Whether the scale is logarithmic.
        x_label: What x is.

    Examples:
        >>> gradrein.watch.Chart("loss", {"loss": [2.0, 1.0]}, x=[0, 1]).x_label
        'step'

    See Also:
        [`gradrein.watch.Finding`][]
    """

    title: str
    lines: dict[str, list[float]]
    x: list[float]
    marks: list[float] = field(default_factory=list)
    log: bool = False
    x_label: str = "step"


@dataclass(frozen=True)
class Finding:
    """Something that the analysis of a record found.

    Attributes:
        name: A short constant name, as in the documentation.
        title: One sentence, with the key number.
        weight: How much of the problem it explains, 0 to 1; findings are ordered by it.
        criterion: What a run has to show for it.
        evidence: The numbers behind it.
        advice: What to do.
        chart: What to draw.
        optimizer: Which optimizer, if the run has several. Set by the report.
        plain: The same for a newcomer, as a clause without technical terms: "a few batches have far larger gradients".
        look: The sample or batch to look at first, as a clause: "sample 689 of the dataset".

    Examples:
        >>> print(gradrein.watch.Finding("spikes", "3 steps are far larger", 0.5, "norm > 10", {"steps": 3}, "clip"))
        spikes: 3 steps are far larger

    See Also:
        [`gradrein.watch.Report`][], [`gradrein.watch.register_finding`][]
    """

    name: str
    title: str
    weight: float
    criterion: str
    evidence: dict[str, Any]
    advice: str
    chart: Chart | None = None
    optimizer: str | None = None
    plain: str = ""
    look: str = ""

    def __str__(self) -> str:
        """Return the name and the title."""
        return f"{self.name}: {self.headline}"

    def _repr_html_(self) -> str:
        chart, picture = self.chart, ""
        if chart is not None:
            picture = curves([(name, [*zip(chart.x, ys, strict=False)]) for name, ys in chart.lines.items()])
        facts = "\n".join(f"{key}: {value}" for key, value in self.evidence.items())
        text = f"criterion: {self.criterion}\n{facts}\nwhat to do: {self.advice}"
        return card(f"{self.headline} [{self.name}]", picture, text)

    @property
    def headline(self) -> str:
        """The title, with the optimizer if the run has several."""
        return self.title if self.optimizer is None else f"{self.optimizer}: {self.title}"
