"""A run in words, and as JSON."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from ._advice import Advice, advise
from ._finding import Finding
from ._run import Run
from ._standing import remarks, standing
from ._stats import finite
from .findings import find

__all__ = ["as_json", "as_text", "number", "value"]


def number(v: float) -> str:
    """A number as people read it."""
    if isinstance(v, float) and not math.isfinite(v):
        return "unknown" if math.isnan(v) else str(v)
    return f"{v:d}" if isinstance(v, int) else f"{v:.4g}"


def value(v: Any) -> str:
    """A piece of evidence in words."""
    if isinstance(v, (int, float)):
        return number(v)
    if isinstance(v, dict):
        return ", ".join(f"{k} ({value(x)})" for k, x in v.items())
    if isinstance(v, list):
        return ", ".join(value(x) for x in v)
    return str(v)


def as_text(run: Run) -> str:
    """Findings and advice, in plain text."""
    parts = [_headline(run), *(_wrap(remark, "", "   ") for remark in remarks(run))]
    found = find(run)
    if not found:
        parts.append("Nothing found: no test of the findings speaks on this run.")
    parts += [_finding(i + 1, finding) for i, finding in enumerate(found)]
    parts.append(_advice(advise(run)))
    return "\n\n".join(parts) + "\n"


def _headline(run: Run) -> str:
    loss = finite(run.loss)
    ends = f"loss {number(loss[0])} -> {number(loss[-1])}" if loss else "no loss seen"
    ranks = f" on each of {len(run.ranks)} ranks" if len(run.ranks) > 1 else ""
    others = f"; {run.others} more optimizer{'s' if run.others > 1 else ''} in the record" if run.others else ""
    return (
        f"{run.path.name}: {run.optimizer}, {sum(run.of)} steps recorded{ranks}, {len(run.names)} parameters, "
        f"{ends}{others}"
    )


def _finding(place: int, finding: Finding) -> str:
    lines = [_wrap(f"{place}. {finding.title} [{finding.name}]", "", "   ")]
    lines.append(_wrap(f"test: {finding.test}"))
    lines += [_wrap(f"{key}: {value(v)}", "   - ", "     ") for key, v in finding.evidence.items()]
    lines.append(_wrap(f"what to do: {finding.advice}"))
    return "\n".join(lines)


def _advice(advice: Advice) -> str:
    if advice.threshold is None or advice.effect is None:
        lines = [_wrap(f"Clipping: no change advised. {advice.because}", "", "   ")]
    else:
        lines = [
            f"Clipping: --clip {advice.policy}, or at a fixed norm: --clip {advice.threshold:g}",
            _wrap(advice.because),
            _wrap(
                f"On this run {advice.threshold:g} would have changed {advice.effect.clipped:.0%} of the steps "
                f"(median factor {number(advice.effect.factor)}) and taken away {advice.effect.removed:.0%} of "
                "the sum of all norms."
            ),
        ]
    if advice.quantiles:
        lines.append("   norms: " + ", ".join(f"{k} {number(v)}" for k, v in advice.quantiles.items()))
    lines += [
        f"   at {c.threshold:<8g} {c.clipped:>4.0%} of steps clipped, {c.removed:>4.0%} of the norm taken away"
        for c in advice.candidates
    ]
    return "\n".join(lines)


def _wrap(text: str, first: str = "   ", rest: str = "   ") -> str:
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=rest, break_long_words=False)


def as_json(run: Run) -> dict[str, Any]:
    """Findings and advice, for programs. Numbers that are not finite are None."""
    advice = advise(run)
    plain = {
        "record": str(run.path),
        "optimizer": run.optimizer,
        "steps": sum(run.of),
        "parameters": len(run.names),
        "remarks": remarks(run),
        **({"ranks": standing(run)} if run.ranks else {}),
        "findings": [{k: v for k, v in vars(finding).items() if k != "picture"} for finding in find(run)],
        "advice": {
            **vars(advice),
            "policy": advice.policy,
            "effect": vars(advice.effect) if advice.effect else None,
            "candidates": [vars(c) for c in advice.candidates],
        },
    }
    return {k: _plain(v) for k, v in plain.items()}


def _plain(v: Any) -> Any:
    if isinstance(v, dict):
        return {k: _plain(x) for k, x in v.items()}
    if isinstance(v, list):
        return [_plain(x) for x in v]
    return None if isinstance(v, float) and not math.isfinite(v) else v
