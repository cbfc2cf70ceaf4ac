"""A report as one HTML page that needs nothing but itself."""

import math
import os
import re
from collections.abc import Sequence
from html import escape
from itertools import cycle
from pathlib import Path

from ..analysis.actions import Action
from ..analysis.advice import Advice
from ..analysis.compare import summary
from ..analysis.finding import Chart, Finding
from ..analysis.losses import BACKWARD, block_of, levels_of, losses_of
from ..analysis.sites import capitalised, label_of
from ..analysis.statistics import finite, running_median
from ..run.run import Run
from . import charts
from .page_file import sign, write_file
from .report import Report
from .text import command, n_parameters, number, value

_STYLE = Path(__file__).with_name("page.css").read_text()


def write_page(
    path: str | os.PathLike[str],
    reports: Sequence[Report],
    all_runs: Sequence[tuple[str, Run]] = (),
    *,
    only_ours: bool = False,
) -> None:
    """Write the page of one run, or of two: before and after; with the curves of several labelled runs if given.

    `only_ours`: replace nothing but such a page.
    """
    write_file(path, to_html(reports, all_runs), only_ours=only_ours)


def to_html(reports: Sequence[Report], all_runs: Sequence[tuple[str, Run]] = ()) -> str:
    """Render the page. Names that come from the user's program are escaped."""
    first, advice = reports[0].run, reports[0].advice
    runs = [_shown(report, advice) for report in reports]
    parts = [_head(reports[:1] if all_runs else reports), *_losses(runs)[:1], _advice(reports[0])]
    if len(runs) == 2:
        parts.append(_comparison(runs))
    if len(all_runs) > 1:
        parts.append(_tried(all_runs))
    parts += [*_losses(runs)[1:], _norms(runs, advice)]
    parts += [_findings(report, _label(runs, i)) for i, report in enumerate(reports)]
    parts += [_ranks(report, _label(runs, i)) for i, report in enumerate(reports)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{sign()}"
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(first.path.name)} · gradrein</title><style>{_STYLE}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _shown(report: Report, advice: Advice) -> Run:
    """Return what is drawn: of several optimizers the one that the advice is about."""
    return next((run for run in report.others if label_of(run) == advice.optimizer), report.run)


def _label(runs: Sequence[Run], i: int) -> str:
    return "" if len(runs) == 1 else ("Before", "After")[i]


def _head(reports: Sequence[Report]) -> str:
    runs = [report.run for report in reports]
    argv = runs[0].header.get("argv") or [runs[0].path.name]
    names = " and ".join(escape(run.path.name) for run in runs)
    verdict = reports[0].verdict
    said = [part for part in (verdict.why, verdict.look, verdict.do) if part]
    if len(reports) > 1:
        said.append(f"With the change{_ends(*runs)}: {reports[1].verdict.what}")
    more = "".join(f"<p class=verdict>{marked(part)}</p>" for part in said)
    return (
        f"<h1>{escape(verdict.what)}</h1>{more}<p class=lead>{escape(os.path.basename(str(argv[0])))}: "
        f"{escape(runs[0].optimizer)}, {sum(runs[0].n_steps)} steps, {n_parameters(runs[0])}; "
        f"record {names}</p>"
    )


def _ends(before: Run, after: Run) -> str:
    """Say where the loss ends in place of where it did; nothing where that is not known of both."""
    first, then = summary(before), summary(after)
    for key, name in (("final test loss", "test loss"), ("training loss, last tenth", "training loss")):
        if math.isfinite(first[key]) and math.isfinite(then[key]):
            return f" the {name} ends at {number(then[key])} in place of {number(first[key])}"
    return ""


def _comparison(runs: Sequence[Run]) -> str:
    before, after = summary(runs[0]), summary(runs[1])
    rows = "".join(
        f"<tr><td>{escape(key)}</td><td class=n>{number(before[key])}</td><td class=n>{number(after[key])}</td></tr>"
        for key in before
        if key in after and not (math.isnan(before[key]) and math.isnan(after[key]))
    )
    return (
        "<section><h2>Before and after</h2><div class=scroll><table><tr><th></th><th class=n>before</th>"
        f"<th class=n>after</th></tr>{rows}</table></div></section>"
    )


def _styles(runs: Sequence[Run]) -> list[tuple[Run, str, str]]:
    return [(runs[0], "a", "")] if len(runs) == 1 else [(runs[0], "b", "before"), (runs[1], "a", "after")]


def _losses(runs: Sequence[Run]) -> list[str]:
    """Return the charts of the losses, the one that a run is judged by first."""
    series, tests = [], []
    for run, style, name in _styles(runs):
        pairs = [(float(s), v) for s, v in zip(run.steps, run.loss, strict=True)]
        smooth = running_median(run.loss, max(3, len(pairs) // 60) | 1)
        series.append((f"{name} each step".strip(), pairs, f"{style} pale"))
        series.append((f"{name} running median".strip(), [*zip(map(float, run.steps), smooth, strict=True)], style))
        shown = run.curves[:1] if name else run.curves[:3]
        for curve, colour in zip(shown, (style, "c", "d"), strict=False):
            points = [(float(a), b) for a, b in zip(curve.steps, curve.values, strict=True)]
            tests.append((f"{name} {curve.name} ({curve.origin})".strip(), points, colour))
    if not any(finite(run.loss) for run in runs):
        return ["<section><h2>Loss</h2><p>No loss was recorded: backward was not called on a number.</p></section>"]
    log = all(v > 0 for run in runs for v in finite(run.loss))
    whose = f" for {escape(label_of(runs[0]))}" if runs[0].n_optimizers > 1 else ""
    text = f"What <code>backward</code> was called on{whose}" + (", on a logarithmic scale." if log else ".")
    trained = f"<section><h2>Training loss</h2><p class=hint>{text}</p>{charts.lines(series, log=log)}</section>"
    if not tests:
        return [trained]
    positive = all(y > 0 for _, points, _ in tests for _, y in points)
    source = f"<p class=hint>Source in brackets: {escape(', '.join(name for name, *_ in tests))}.</p>"
    drawn = charts.lines(tests, log=positive)
    return [f"<section><h2>Validation or test loss</h2>{source}{drawn}</section>", trained]


def _norms(runs: Sequence[Run], advice: Advice) -> str:
    series = [
        (name or "norm", [(float(s), v) for s, v in zip(run.steps, run.norm, strict=True)], style)
        for run, style, name in _styles(runs)
    ]
    levels = [(f"advised {advice.threshold:g}", advice.threshold)] if advice.threshold else []
    clipped = sum(1 for c in runs[-1].clip if c < 1)
    return (
        f"<section><h2>Gradient norm</h2><p class=hint>Before any clipping, on a logarithmic scale. {clipped} of "
        f"{len(runs[-1].clip)} recorded steps were clipped.</p>"
        f"{charts.lines(series, log=True, levels=levels)}</section>"
    )


def _findings(report: Report, label: str) -> str:
    title = f"Findings {label.lower()}" if label else "Findings"
    body = "".join(_finding(one) for one in report.findings) or "<p class=good>No findings.</p>"
    return f"<section><h2>{title}</h2>{body}</section>"


def _finding(one: Finding) -> str:
    headline = capitalised(one.headline, one.optimizer)
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(value(v))}</td></tr>" for k, v in one.evidence.items())
    look = f" Look first at {marked(one.look)}." if one.look else ""
    return (
        f"<article><h3>{escape(headline)} <span class=slug>{escape(one.name)}</span></h3>"
        f"{_chart(one.chart) if one.chart else ''}<div class=scroll><table>{rows}</table></div>"
        f"<p class=test>Criterion: {escape(one.criterion)}.</p><p class=do>{marked(one.advice)}{look}</p></article>"
    )


def _chart(chart: Chart) -> str:
    named = zip(chart.lines.items(), cycle("abc"), strict=False)
    series = [(name, list(zip(chart.x, values, strict=True)), style) for (name, values), style in named]
    drawn = charts.lines(series, log=chart.log, marks=chart.marks, x_label=chart.x_label)
    return f"<p class=hint>{escape(chart.title)}</p>{drawn}"


def marked(text: str) -> str:
    """Escape a text, with its `names` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _advice(report: Report) -> str:
    """Render what to change, with the lines for the script and the command that tries it."""
    advice = report.advice
    if advice.actions:
        actions = "".join(_action(report, action) for action in advice.actions)
        words = f"<p>{marked(advice.because)}</p><ol class=actions>{actions}</ol>"
    else:
        words = f"<p><b>No change is advised.</b> {marked(advice.because)}</p>"
    return f"<section><h2>What to change</h2>{words}</section>"


def _action(report: Report, action: Action) -> str:
    text = f"<li><b>{marked(capitalised(action.do))}.</b> {marked(action.why)}"
    if action.try_with:
        whose = ", for every optimizer" if report.advice.optimizer else ""
        text += f" Without editing{whose}: <code>{escape(command(report, action))}</code>"
    if action.lines:
        lines = "\n".join(escape(line) for line in action.lines)
        text += f"<div class=hint>{escape(capitalised(action.where))}</div><pre>{lines}</pre>"
    return text + "</li>"


def _ranks(report: Report, label: str) -> str:
    """Render a table with a row for each rank, and what was not in order."""
    if not report.run.ranks:
        return ""
    rows = report.rank_table
    head = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(value(v))}</td>' for v in row.values())}</tr>" for row in rows)
    warnings = "".join(f"<p class=do>{escape(warning)}</p>" for warning in report.warnings)
    return (
        f"<section><h2>Ranks{', ' + label.lower() if label else ''}</h2>{warnings}"
        f"<div class=scroll><table><tr>{head}</tr>{body}</table></div></section>"
    )


def _tried(labelled: Sequence[tuple[str, Run]]) -> str:
    """Render the losses of labelled runs in one chart for each kind."""
    drawn = ""
    for title, batches in (("Validation or test loss", False), ("Training loss, averaged over 1/40 of the run", True)):
        series = []
        for (label, run), style in zip(labelled, cycle("bacdefg"), strict=False):
            loss = next((loss for loss in losses_of(run) if (loss.origin == BACKWARD) == batches), None)
            if loss is not None and loss.values:
                at = (float(step) for step in loss.steps[:: block_of(loss)])
                series.append((label, [*zip(at, levels_of(loss), strict=False)], style))
        if len(series) > 1:
            log = all(y > 0 for _, points, _ in series for _, y in points)
            drawn += f"<p class=hint>{escape(title)}</p>{charts.lines(series, log=log)}"
    return f"<section><h2>What was tried</h2>{drawn}</section>"
