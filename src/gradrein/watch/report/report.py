"""The report on a run as one value: built once, rendered as text, JSON and HTML."""

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

from ..._notebook import card, curves
from ..analysis.advice import LOST, Advice, advise
from ..analysis.divergence import broke_at
from ..analysis.finding import Finding
from ..analysis.findings import find
from ..analysis.rank_table import rank_table, warnings
from ..analysis.sites import label_of
from ..analysis.verdict import Verdict, verdict_on
from ..run.reader import read_runs
from ..run.run import Run


@dataclass(frozen=True)
class Report:
    """The analysis of a record.

    Attributes:
        run: The steps of the optimizer with the most steps.
        findings: The findings for every optimizer of the run, the most important first.
        advice: The recommendation for `run`, or for the optimizer that needs it, if that is another one.
        warnings: Sentences about what is missing from the record.
        others: The runs of the other optimizers.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with gradrein.Monitor(None, optimizer) as monitor:
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> report = monitor.report()
        >>> report.findings, report.run.optimizer
        ([], 'SGD')

    See Also:
        [`gradrein.watch.read_report`][], [`gradrein.watch.Finding`][], [`gradrein.watch.Advice`][]
    """

    run: Run
    findings: list[Finding]
    advice: Advice
    warnings: list[str]
    others: tuple[Run, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """What happened, why, and what to do, in one sentence each."""
        return verdict_on(self.run, self.findings, self.advice)

    @property
    def rank_table(self) -> list[dict[str, float | str]]:
        """A row for each rank; empty for a run of one process."""
        return rank_table(self.run)

    def __str__(self) -> str:
        """Return what happened, why, and what to change, in at most eleven lines."""
        from .text import to_text

        return to_text(self)

    def details(self) -> str:
        """Return everything as text: each finding with its criterion and evidence, and every change."""
        from .text import to_long_text

        return to_long_text(self)

    def _repr_html_(self) -> str:
        run = self.run
        columns = (("loss", run.loss), ("gradient norm", run.norm))
        picture = curves([(name, [*zip(map(float, run.steps), column, strict=True)]) for name, column in columns])
        return card(f"{run.optimizer}, {sum(run.n_steps)} steps", picture, str(self))

    def write_page(self, path: str | os.PathLike[str], *, before: "Report | None" = None) -> None:
        """Write the report as an HTML page, compared with that of an earlier run if one is given."""
        from .html import write_page

        write_page(path, [self] if before is None else [before, self])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict, for programs. Numbers that are not finite are None."""
        run, advice = self.run, self.advice
        plain = {
            "record": str(run.path),
            "optimizer": run.optimizer,
            "steps": sum(run.n_steps),
            "parameters": len(run.names),
            "verdict": vars(self.verdict),
            "curves": [vars(curve) for curve in run.curves],
            "warnings": self.warnings,
            **({"ranks": self.rank_table} if run.ranks else {}),
            "findings": [{k: v for k, v in vars(one).items() if k != "chart"} for one in self.findings],
            "advice": {
                **vars(advice),
                "policy": advice.policy,
                "actions": [vars(action) for action in advice.actions],
            },
        }
        return {k: _plain(v) for k, v in plain.items()}


def read_report(path: str | os.PathLike[str], optimizer: int | None = None) -> Report:
    """Read a record and report on it.

    Args:
        path: The file, as for `read_run`.
        optimizer: Which optimizer, by number. None: all of them.

    Returns:
        The report. `str(report)` is what `gradrein report` prints, `report.to_dict()` is for programs.

    Raises:
        RecordError: (a ValueError) as in `read_run`.

    Examples:
        >>> with gradrein.Monitor() as monitor:
        ...     pass
        >>> gradrein.watch.read_report(monitor.path).findings
        []

    See Also:
        [`gradrein.watch.read_run`][], [`gradrein.watch.Report`][]
    """
    return report_on(*read_runs(path, optimizer))


def report_on(run: Run, *others: Run) -> Report:
    """Apply every check to every run, once."""
    failures: list[str] = []
    findings = find(run, failures)
    labelled = [_labelled(one, run) for one in findings] if others else findings
    known = {(one.name, one.title) for one in findings}  # where optimizers share a loss, say it once
    judged = []
    for other in others:
        of_other = find(other, failures)
        judged.append((other, of_other))
        new = [one for one in of_other if (one.name, one.title) not in known]
        labelled += [_labelled(one, other) for one in new]
        known |= {(one.name, one.title) for one in new}
    broke = {label_of(one): broke_at(one) for one in (run, *others)}
    labelled.sort(key=lambda one: _order(one, broke.get(one.optimizer or "", math.inf)))
    said = [*warnings(run), *_cautions(run, *others), *failures]
    return Report(run, labelled, _advise((run, findings), *judged), said, others)


def _cautions(*runs: Run) -> list[str]:
    """Return sentences about optimizers that were used in a way that is rarely meant."""
    if not any(run.optimizer == "LBFGS" and any(factor < 1 for factor in run.clip) for run in runs):
        return []
    return [
        "LBFGS is clipped: its line search and its estimate of the curvature compare gradients, and clipped ones "
        "mislead them. Lower its learning rate instead."
    ]


def _order(finding: Finding, broke: float) -> tuple[float, float]:
    """Return where a finding comes: the weightiest first, and of optimizers that broke the one that did so first."""
    is_lost = finding.name in LOST and math.isfinite(broke)
    return (-1.0, broke) if is_lost else (-finding.weight, math.inf)


def _advise(*judged: tuple[Run, list[Finding]]) -> Advice:
    """Advise on the optimizer whose finding comes first and calls for something; on the first where none does."""
    nothing = (1.0, math.inf)
    each = []
    for run, findings in judged:
        advice, broke = advise(run, findings), broke_at(run)
        first = min((_order(f, broke) for f in findings), default=(0.0, math.inf))
        each.append((first if advice.actions else nothing, run, advice))
    _, run, advice = min(each, key=lambda one: one[0])
    return dataclasses.replace(advice, optimizer=label_of(run)) if len(judged) > 1 and advice.actions else advice


def _labelled(finding: Finding, run: Run) -> Finding:
    return dataclasses.replace(finding, optimizer=label_of(run))


def _plain(v: Any) -> Any:
    if isinstance(v, dict):
        return {k: _plain(x) for k, x in v.items()}
    if isinstance(v, list):
        return [_plain(x) for x in v]
    return None if isinstance(v, float) and not math.isfinite(v) else v
