"""A report as plain text: at most twelve lines with the line about the page, or all of it."""

import math
import shlex
import textwrap
from typing import Any

from ..analysis.actions import Action
from ..analysis.advice import TRY
from ..analysis.finding import Finding
from ..analysis.sites import capitalised
from ..analysis.statistics import finite
from ..run.run import Run
from .report import Report

_MOST_LINES = 11  # who prints it adds where the page is
_WIDTH = 110


def n_parameters(run: Run) -> str:
    """Return how many parameters a run has, in words."""
    return f"{len(run.names)} parameter{'s' if len(run.names) != 1 else ''}"


def number(v: float) -> str:
    """Format a number for people."""
    if isinstance(v, float) and not math.isfinite(v):
        return "unknown" if math.isnan(v) else str(v)
    return f"{v:d}" if isinstance(v, int) else f"{v:.4g}"


def loss_value(v: float) -> str:
    """Format a loss that was seen: one that is not a number is NaN, and not unknown."""
    return "NaN" if math.isnan(v) else number(v)


def last_loss(run: Run) -> str:
    """Return the loss a run ends with: NaN or infinity where it ends so, not what came before."""
    known = finite(run.loss)
    if not known:
        return "none"
    is_last = bool(run.nonfinite) and run.nonfinite[-1].step == run.steps[-1]  # else it was not recorded
    return loss_value(run.loss[-1] if is_last or math.isinf(run.loss[-1]) else known[-1])


def value(v: Any) -> str:
    """Format a value of the evidence for people."""
    if isinstance(v, (int, float)):
        return number(v)
    if isinstance(v, dict):
        return ", ".join(f"{k} ({value(x)})" for k, x in v.items())
    if isinstance(v, list):
        return ", ".join(value(x) for x in v)
    return str(v)


def to_text(report: Report) -> str:
    """Render what happened, why, what to look at first and one change: as much of it as a few lines hold."""
    headline, names = _headline(report).split("\n")[0], ", ".join(dict.fromkeys(f.name for f in report.findings))
    listed = f"All findings (--verbose): {names}" if names else ""
    for above, below, lines in ((headline, listed, 2), (headline, "", 2), ("", "", 2), ("", "", 1)):
        text = "\n".join(part for part in (_brief(above, 1), *_middle(report, lines), _brief(below, 1)) if part)
        if text.count("\n") < _MOST_LINES:
            break
    return text + "\n"


def _middle(report: Report, lines: int) -> list[str]:
    verdict, advice = report.verdict, report.advice
    said = [" ".join(report.warnings), verdict.what, verdict.why, verdict.look, verdict.do]
    if not report.findings:
        said.append(f"No findings. {advice.because}")
    parts = [_brief(text, lines) for text in said]
    for action in advice.actions[:1]:
        parts += [_brief(capitalised(action.where), 1), *(f"    {line}" for line in action.lines[:3])]
        count = sum(bool(other.try_with) for other in advice.actions)
        measure = f" (--try measures {count} changes)" if count > 1 and action.try_with != TRY else ""
        # Whole, however long: to be copied
        parts.append(f"Try it without editing{measure}: {command(report, action)}" if action.try_with else "")
    return parts


def command(report: Report, action: Action) -> str:
    """Return the command that tries a change: on this script with its arguments, where these are known."""
    argv = report.run.header.get("argv") or []
    script = shlex.join(map(str, argv)) if argv and str(argv[0]).endswith(".py") else "..."
    return f"gradrein watch {action.try_with} {script}"


def to_long_text(report: Report) -> str:
    """Render everything: each finding with its criterion and evidence, and every change."""
    parts = [
        _wrap(str(report.verdict), "", ""),
        _headline(report),
        *(_wrap(warning, "", "   ") for warning in report.warnings),
    ]
    if not report.findings:
        parts.append("No findings.")
    parts += [_finding(i + 1, finding) for i, finding in enumerate(report.findings)]
    parts.append(_advice(report))
    return "\n\n".join(parts) + "\n"


def _brief(text: str, lines: int) -> str:
    """Wrap a text to so many lines; what is longer ends in dots."""
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="   ", max_lines=lines, placeholder=" ..."))


def _headline(report: Report) -> str:
    run = report.run
    loss = finite(run.loss)
    ends = f"loss {number(loss[0])} -> {last_loss(run)}" if loss else "no loss seen"
    ranks = f" on each of {len(run.ranks)} ranks" if len(run.ranks) > 1 else ""
    seen = [
        f"{c.name} {loss_value(c.values[0])} -> {loss_value(c.values[-1])}, {len(c)} values ({c.origin})"
        for c in run.curves[:2]
    ]
    more = run.n_optimizers - 1
    others = f"; {more} more optimizer{'s' if more > 1 else ''} in the record" if more else ""
    return (
        f"{run.path.name}: {run.optimizer}, {sum(run.n_steps)} steps recorded{ranks}, {n_parameters(run)}, "
        f"{ends}{others}" + "".join(f"\n   {one}" for one in seen)
    )


def _finding(number: int, finding: Finding) -> str:
    lines = [_wrap(f"{number}. {finding.headline} [{finding.name}]", "", "   ")]
    lines.append(_wrap(f"criterion: {finding.criterion}"))
    lines += [_wrap(f"{key}: {value(v)}", "   - ", "     ") for key, v in finding.evidence.items()]
    look = f" Look first at {finding.look}." if finding.look else ""
    lines.append(_wrap(f"what to do: {finding.advice}{look}"))
    return "\n".join(lines)


def _advice(report: Report) -> str:
    advice = report.advice
    head = "What to change" if advice.actions else "Clipping: no change advised"
    head += f", {advice.optimizer}" if advice.optimizer else ""
    lines = [_wrap(f"{head}. {advice.because}", "", "   ")]
    for i, action in enumerate(advice.actions, start=1):
        lines.append(_wrap(f"{i}) {capitalised(action.do)}. {action.why}", "   ", "      "))
        if action.try_with:
            whose = ", for every optimizer" if advice.optimizer else ""
            lines.append(f"      without editing{whose}: {command(report, action)}")
        if action.where:
            lines.append(f"      {action.where}")
        lines += [f"        | {line}" for line in action.lines]
    if advice.quantiles:
        lines.append("   norms: " + ", ".join(f"{k} {number(v)}" for k, v in advice.quantiles.items()))
    return "\n".join(lines)


def _wrap(text: str, first: str = "   ", rest: str = "   ") -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False)
