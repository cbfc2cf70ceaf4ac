"""A report as one HTML page that needs nothing but itself."""

import math
import os
from collections.abc import Sequence
from html import escape
from itertools import cycle

from ..analysis.advice import Advice
from ..analysis.compare import summary
from ..analysis.finding import Chart, Finding
from ..analysis.findings import count_checks
from ..analysis.statistics import finite, running_median
from ..run.run import Run
from . import charts
from .charts import Line
from .css import CSS
from .html_ranks import ranks_section
from .page_file import sign, write_file
from .report import Report
from .text import number, value


def write_page(path: str | os.PathLike[str], reports: Sequence[Report], *, only_ours: bool = False) -> None:
    """Write the page of one run, or of two: before and after. `only_ours`: replace nothing but such a page."""
    write_file(path, to_html(reports), only_ours=only_ours)


def to_html(reports: Sequence[Report]) -> str:
    """Render the page. Names that come from the user's program are escaped."""
    runs = [report.run for report in reports]
    first, advice = runs[0], reports[0].advice
    parts = [_head(reports), _tiles(runs)]
    if len(runs) == 2:
        parts.append(_comparison(runs))
    parts += [_losses(runs), _norms(runs, advice), _advice_section(runs, advice)]
    parts += [_findings(report, _label(runs, i)) for i, report in enumerate(reports)]
    parts += [ranks_section(report, _label(runs, i)) for i, report in enumerate(reports)]
    parts += [_heat(run, _label(runs, i)) for i, run in enumerate(runs)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{sign()}"
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(first.path.name)} · bridle</title><style>{CSS}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _label(runs: Sequence[Run], i: int) -> str:
    return "" if len(runs) == 1 else ("Before", "After")[i]


def _head(reports: Sequence[Report]) -> str:
    runs = [report.run for report in reports]
    argv = runs[0].header.get("argv") or [runs[0].path.name]
    names = " and ".join(escape(run.path.name) for run in runs)
    return (
        f"<h1>{escape(_headline(reports))}</h1><p class=lead>{escape(os.path.basename(str(argv[0])))}: "
        f"{escape(runs[0].optimizer)}, {sum(runs[0].n_steps)} steps, {len(runs[0].names)} parameters; "
        f"record {names}</p>"
    )


def _headline(reports: Sequence[Report]) -> str:
    found = reports[0].findings
    first = f"{_capital(found[0].headline)}." if found else "No findings on this run."
    if len(reports) == 1:
        return first
    before, after = (summary(report.run) for report in reports)
    test = next((k for k in before if "swing" in k and "test" in k and not math.isnan(before[k] + after[k])), None)
    key = test or next(iter(before))
    return f"{first} After: {'test' if test else 'training'} swing {before[key]:.3g}x → {after[key]:.3g}x."


def _tiles(runs: Sequence[Run]) -> str:
    run, when = runs[-1], " (after)" if len(runs) == 2 else ""
    loss, norm = finite(run.loss), finite(run.norm)
    clipped = finite(run.clip)
    tiles = [
        ("last loss", number(loss[-1]) if loss else "none"),
        ("lowest loss", number(min(loss)) if loss else "none"),
        ("median gradient norm", number(sorted(norm)[len(norm) // 2]) if norm else "none"),
        ("largest gradient norm", number(max(norm)) if norm else "none"),
        ("steps clipped", f"{sum(1 for c in clipped if c < 1) / len(clipped):.0%}" if clipped else "off"),
        ("non-finite steps", number(len(run.nonfinite))),
    ]
    return (
        '<div class="tiles">'
        + "".join(f"<div class=tile><b>{v}</b><span>{k}{when}</span></div>" for k, v in tiles)
        + "</div>"
    )


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


def _losses(runs: Sequence[Run]) -> str:
    series, tests = [], []
    for run, style, name in _styles(runs):
        pairs = [(float(s), v) for s, v in zip(run.steps, run.loss, strict=True)]
        smooth = running_median(run.loss, max(3, len(pairs) // 60) | 1)
        series.append(Line(f"{name} each step".strip(), pairs, f"{style} pale"))
        series.append(
            Line(f"{name} running median".strip(), list(zip(map(float, run.steps), smooth, strict=True)), style)
        )
        if noted := run.noted_losses("test"):
            tests.append(Line(f"{name} test".strip(), [(float(a), b) for a, b in noted], style, dots=True))
    if not any(finite(run.loss) for run in runs):
        return "<section><h2>Loss</h2><p>No loss was recorded: backward was not called on a number.</p></section>"
    log = all(v > 0 for run in runs for v in finite(run.loss))
    text = "What <code>backward</code> was called on" + (", on a logarithmic scale." if log else ".")
    found = f"<section><h2>Loss</h2><p class=hint>{text}</p>{charts.lines(series, log=log)}</section>"
    if tests:
        positive = all(y > 0 for one in tests for _, y in one.points)
        found += (
            "<section><h2>Test loss</h2><p class=hint>As the script reported it.</p>"
            f"{charts.lines(tests, log=positive)}</section>"
        )
    return found


def _norms(runs: Sequence[Run], advice: Advice) -> str:
    series = [
        Line(name or "norm", [(float(s), v) for s, v in zip(run.steps, run.norm, strict=True)], style)
        for run, style, name in _styles(runs)
    ]
    levels = [(f"advised {advice.threshold:g}", advice.threshold)] if advice.threshold else []
    clipped = [float(s) for s, c in zip(runs[-1].steps, runs[-1].clip, strict=True) if c < 1]
    ticks = "Ticks at the foot: steps that were clipped." if clipped else "No step was clipped."
    return (
        f"<section><h2>Gradient norm</h2><p class=hint>Before any clipping, on a logarithmic scale. {ticks}</p>"
        f"{charts.lines(series, log=True, levels=levels, ticks_at=clipped)}</section>"
    )


def _advice_section(runs: Sequence[Run], advice: Advice) -> str:
    if advice.threshold is None or advice.effect is None:
        words = f"<p><b>No change is advised.</b> {escape(advice.because)}</p>"
        levels = []
    else:
        words = (
            f"<p class=do><b>Clip:</b> <code>bridle watch --clip {advice.policy} ...</code>, or at a fixed norm: "
            f"<code>bridle.clip_(model, "
            f"bridle.by_norm({advice.threshold:g}))</code></p><p>{escape(advice.because)} On this "
            f"run {advice.threshold:g} would have changed {advice.effect.clipped:.0%} of the steps, by "
            f"{number(advice.effect.factor)} in the "
            f"median, and removed {advice.effect.removed:.0%} of the sum of all norms.</p>"
        )
        levels = [(f"advised {advice.threshold:g}", advice.threshold)]
    groups = [(name or "steps", style, run.norm) for run, style, name in _styles(runs)]
    rows = "".join(
        f"<tr{' class=pick' if c.threshold == advice.threshold else ''}><td class=n>{c.threshold:g}</td>"
        f"<td class=n>{c.clipped:.0%}</td><td class=n>{c.removed:.0%}</td><td class=n>{number(c.factor)}</td></tr>"
        for c in advice.candidates
    )
    table = (
        "<div class=scroll><table><tr><th class=n>threshold</th><th class=n>steps clipped</th>"
        f"<th class=n>norm removed</th><th class=n>median factor</th></tr>{rows}</table></div>"
        if rows
        else ""
    )
    return (
        f"<section><h2>How large the gradients are, and where to clip</h2>{words}"
        f"{charts.histogram(groups, levels)}<p class=hint>What each threshold would have done on this "
        f"run:</p>{table}</section>"
    )


def _findings(report: Report, label: str) -> str:
    title = f"Findings {label.lower()}" if label else "Findings"
    if not report.findings:
        body = f"<p class=good>No findings: none of the {count_checks()} checks fired.</p>"
    else:
        body = "".join(_finding(one) for one in report.findings)
    return f"<section><h2>{title}</h2>{body}</section>"


def _finding(one: Finding) -> str:
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(value(v))}</td></tr>" for k, v in one.evidence.items())
    return (
        f"<article><h3>{escape(_capital(one.headline))} <span class=slug>{escape(one.name)}</span></h3>"
        f"{_chart(one.chart) if one.chart else ''}<div class=scroll><table>{rows}</table></div>"
        f"<p class=test>Test: {escape(one.test)}.</p><p class=do>{escape(one.advice)}</p></article>"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _chart(chart: Chart) -> str:
    if not chart.x:
        drawn = charts.bars({name: values[0] for name, values in chart.lines.items()})
    else:
        named = zip(chart.lines.items(), cycle("abc"), strict=False)
        series = [Line(name, list(zip(chart.x, values, strict=True)), style) for (name, values), style in named]
        drawn = charts.lines(series, log=chart.log, marks=chart.marks, x_label=chart.x_label)
    return f"<p class=hint>{escape(chart.title)}</p>{drawn}"


def _heat(run: Run, label: str) -> str:
    modules = run.norm_by_module()
    if not modules or not run.steps:
        return ""
    return (
        f"<section><h2>Which module, when{', ' + label.lower() if label else ''}</h2>"
        "<p class=hint>Gradient norm of each module's own parameters over the run; the largest of each stretch.</p>"
        f"{charts.heat_map(modules, run.steps)}</section>"
    )
