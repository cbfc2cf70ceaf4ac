"""What a finding is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding", "Picture"]


@dataclass(frozen=True)
class Picture:
    """What to draw beside a finding: lines over steps, or bars by name.

    Attributes:
        title: what is seen.
        lines: series by name, over `x`; bars by name if `x` is empty (one value each).
        x: the steps.
        marks: places on x worth a line.
        log: is the scale logarithmic?
        x_label: what x is.
    """

    title: str
    lines: dict[str, list[float]]
    x: list[float] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    log: bool = False
    x_label: str = "step"


@dataclass(frozen=True)
class Finding:
    """Something a record shows.

    Attributes:
        name: a short constant name, as in the documentation.
        title: one sentence, with the number that matters.
        weight: how much of the trouble it explains, 0 to 1; findings are ordered by it.
        test: the test that was applied.
        evidence: the numbers behind it.
        advice: what to do.
        picture: what to look at.
    """

    name: str
    title: str
    weight: float
    test: str
    evidence: dict[str, Any]
    advice: str
    picture: Picture | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.title}"
