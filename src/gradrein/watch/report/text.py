"""A report as plain text."""

import math
import textwrap
from typing import Any

from ..analysis.advice import Advice
from ..analysis.finding import Finding
from ..analysis.findings import count_checks
from ..analysis.statistics import finite
from ..run.run import Run
from .report import Report


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
    """Render findings and advice."""
    parts = [
        _wrap(str(report.verdict), "", ""),
        _headline(report),
        *(_wrap(warning, "", "   ") for warning in report.warnings),
    ]
    if not report.findings:
        parts.append(f"No findings: none of the {count_checks()} checks fired.")
    parts += [_finding(i + 1, finding) for i, finding in enumerate(report.findings)]
    parts.append(_advice(report.advice))
    return "\n\n".join(parts) + "\n"


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
    lines.append(_wrap(f"test: {finding.test}"))
    lines += [_wrap(f"{key}: {value(v)}", "   - ", "     ") for key, v in finding.evidence.items()]
    lines.append(_wrap(f"what to do: {finding.advice}"))
    return "\n".join(lines)


def _advice(advice: Advice) -> str:
    head = "What to change" if advice.actions else "Clipping: no change advised"
    head += f", {advice.optimizer}" if advice.optimizer else ""
    lines = [_wrap(f"{head}. {advice.because}", "", "   ")]
    for i, action in enumerate(advice.actions, start=1):
        lines.append(_wrap(f"{i}) {action.do[:1].upper()}{action.do[1:]}. {action.why}", "   ", "      "))
        if action.try_with:
            whose = ", for every optimizer" if advice.optimizer else ""
            lines.append(f"      without editing{whose}: gradrein watch {action.try_with} ...")
        if action.paste is not None:
            lines.append(f"      {action.paste.place}")
            lines += [f"        | {line}" for line in action.paste.lines]
    if advice.threshold is not None and advice.effect is not None:
        lines.append(
            _wrap(
                f"On this run {advice.threshold:g} would have changed {advice.effect.clipped:.0%} of the steps "
                f"(median factor {number(advice.effect.factor)}) and removed {advice.effect.removed:.0%} of "
                "the sum of all norms."
            )
        )
    if advice.quantiles:
        lines.append("   norms: " + ", ".join(f"{k} {number(v)}" for k, v in advice.quantiles.items()))
    if advice.actions:
        lines += [
            f"   at {c.threshold:<8g} {c.clipped:>4.0%} of steps clipped, {c.removed:>4.0%} of the norm removed"
            for c in advice.candidates
        ]
    return "\n".join(lines)


def _wrap(text: str, first: str = "   ", rest: str = "   ") -> str:
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=rest, break_long_words=False)
