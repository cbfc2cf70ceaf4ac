"""The page that `Trace.to_html` writes: modules, then every node in order with its edges drawn beside it."""

import math
from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from .grad_stats import GradStats, combine
from .records import ModuleSummary, NodeRecord, module_name, short

_ROW = 24  # height of a row in pixels, shared by the table and the drawing beside it
_LANE = 12  # distance between two edges that run side by side
# Bars are logarithmic: from the smallest norm on the page to the largest, as powers of ten.
Scale: TypeAlias = tuple[float, float]

_STYLE = """
:root { --ink: #1c2430; --soft: #5d6b7c; --line: #d8dee6; --back: #ffffff; --band: #f4f6f9;
        --mark: #2f6fde; --bad: #c62828; --badback: #fdecec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9f0; --soft: #93a1b3; --line: #333d4a; --back: #14191f; --band: #1b222b;
          --mark: #6ea2ff; --bad: #ff7b72; --badback: #3a1d20; } }
* { box-sizing: border-box }
body { margin: 0; padding: 24px; color: var(--ink); background: var(--back);
       font: 13px/1.4 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 1400px; margin: 0 auto }
h1 { font-size: 20px; margin: 0 0 4px } h2 { font-size: 15px; margin: 32px 0 4px } p { color: var(--soft);
     margin: 0 0 12px; max-width: 90ch }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { position: sticky; top: 0; background: var(--back); color: var(--soft); font-weight: 600;
     text-align: right; box-shadow: inset 0 -1px var(--line) }
th, td { padding: 0 6px; height: 24px; white-space: nowrap; text-align: right }
td.name, th.name { text-align: left; max-width: 27ch; overflow: hidden; text-overflow: ellipsis }
tr.band td { background: var(--band) } tr.bad td { background: var(--badback) }
tr.leaf td.op { color: var(--soft) } td.soft { color: var(--soft) } .bad b { color: var(--bad) }
.bar { position: relative; min-width: 96px; text-align: right }
.bar i { position: absolute; left: 6px; bottom: 0; height: 3px; border-radius: 2px;
         background: var(--mark) }
.bad .bar i { background: var(--bad) }
td.graph { padding: 0; vertical-align: top; background: var(--back) !important }
svg { display: block } svg path { fill: none; stroke: var(--soft); stroke-width: 1.3; opacity: .75 }
svg circle { fill: var(--mark); stroke: var(--back); stroke-width: 1.5 } svg circle.leaf { fill: var(--soft) }
svg circle.bad { fill: var(--bad) }
.scroll { overflow-x: auto }
"""


def page(nodes: tuple[NodeRecord, ...], modules: tuple[ModuleSummary, ...], seconds: float) -> str:
    """Return the page as text."""
    scale = _scale([*(n.incoming for n in nodes), *(n.outgoing for n in nodes), *(m.parameters for m in modules)])
    low, high = (f"{10**bound:.1e}" for bound in scale)
    legend = f"Bars are logarithmic, from {low} to {high}." if low != high else ""
    count = sum(node.op == "AccumulateGrad" for node in nodes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Backward pass</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>Backward pass</h1>"
        f"<p>{len(nodes)} nodes, {count} of them leaves, in {seconds * 1e3:.1f} ms. "
        f"{legend} {_summary(nodes)}</p>"
        f"{_module_table(modules, scale)}{_node_table(nodes, scale)}</main></body></html>\n"
    )


def _scale(several: Iterable[GradStats | None]) -> Scale:
    norms = [stats.norm for stats in several if stats is not None]
    logs = [math.log10(norm) for norm in norms if 0 < norm < math.inf]
    return (min(logs), max(logs)) if logs else (0.0, 0.0)


def _norm_cell(stats: GradStats | None, scale: Scale) -> str:
    if stats is None:
        return '<td class="bar soft">–</td>'
    if not 0 < stats.norm < math.inf:
        return f'<td class="bar">{short(stats.norm)}</td>'
    low, high = scale
    share = (math.log10(stats.norm) - low) / ((high - low) or 1.0)
    return f'<td class="bar">{short(stats.norm)}<i style="width:{4 + 76 * share:.0f}px"></i></td>'


def _summary(nodes: tuple[NodeRecord, ...]) -> str:
    if all(node.incoming is None for node in nodes):
        return "Norms were not measured."
    bad = [node for node in nodes if _nonfinite(node)]
    if not bad:
        return "Every gradient is finite."
    where = f"{bad[0].op}, module {module_name(bad[0].module)}"
    return f'<span class="bad"><b>NaN or inf first at node {bad[0].index}: {escape(where)}.</b></span>'


def _module_table(modules: tuple[ModuleSummary, ...], scale: Scale) -> str:
    total = sum(module.seconds for module in modules) or 1.0
    rows = []
    for at, module in enumerate(modules):
        combined = combine((module.entering, module.leaving, module.parameters))
        style = "bad" if combined is not None and combined.nonfinite else "band" if at % 2 else ""
        name = escape(module_name(module.module))
        rows.append(
            f'<tr class="{style}"><td class="name" title="{name}">{name}</td><td>{module.nodes}</td>'
            f"<td>{module.seconds * 1e3:.2f}</td><td>{module.seconds / total:.0%}</td>"
            + "".join(_norm_cell(stats, scale) for stats in (module.entering, module.leaving, module.parameters))
            + f"{_counts(combined)}</tr>"
        )
    return (
        "<h2>By module</h2><p>In the order in which the gradient reaches them. The norm of what enters a "
        "module from outside, of what it sends on, and of its own parameters.</p>"
        '<div class="scroll"><table><tr><th class="name">module</th><th>nodes</th><th>ms</th><th>time</th>'
        "<th>entering</th><th>leaving</th><th>parameters</th><th>zeros</th><th>non-finite</th></tr>"
        f"{''.join(rows)}</table></div>"
    )


def _node_table(nodes: tuple[NodeRecord, ...], scale: Scale) -> str:
    drawing, width = _drawing(nodes)
    rows, bands, last = [], 0, object()
    for node in nodes:
        bands, last = (bands, last) if node.module == last else (bands + 1, node.module)
        style = "bad" if _nonfinite(node) else "band" if bands % 2 else ""
        picture = f'<td class="graph" rowspan="{len(nodes)}">{drawing}</td>' if node.index == 0 else ""
        module = escape(("" if node.exact else "after ") + module_name(node.module))
        op = escape(node.op if node.parameter is None else f"grad of {node.parameter}")
        shape = "×".join(map(str, node.shape)) or "scalar"
        rows.append(
            f'<tr class="{style}{" leaf" if _leaf(node) else ""}">{picture}<td class="soft">{node.index}</td>'
            f'<td class="name op" title="{op}">{op}</td><td class="name soft" title="{module}">{module}</td>'
            f'<td class="soft">{shape}</td><td class="soft">{str(node.dtype).removeprefix("torch.")}</td>'
            f"<td>{node.seconds * 1e3:.2f}</td>{_norm_cell(node.incoming, scale)}{_norm_cell(node.outgoing, scale)}"
            f"{_counts(combine((node.incoming, node.outgoing)))}</tr>"
        )
    return (
        "<h2>Every node</h2><p>In the order in which they ran. Lines on the left lead from a node to those "
        "it sends gradients to; grey dots are leaves. Zeros and non-finite values are counted in what comes "
        'in and what goes out.</p><div class="scroll"><table><tr>'
        f'<th style="min-width:{width}px"></th><th>#</th><th class="name">op</th><th class="name">module</th>'
        "<th>shape</th><th>dtype</th><th>ms</th><th>incoming</th><th>outgoing</th><th>zeros</th>"
        f"<th>non-finite</th></tr>{''.join(rows)}</table></div>"
    )


def _drawing(nodes: tuple[NodeRecord, ...]) -> tuple[str, int]:
    """Draw the edges as lines that run down beside the rows, each in a lane that is free that far."""
    node_lane, lanes, paths = {0: 0}, [-1], []  # for each lane, the row up to which it is taken
    for node in nodes:
        start = node_lane.setdefault(node.index, 0)
        for target in dict.fromkeys(node.targets):
            lane = node_lane.get(target)
            if lane is None:
                lane = next((at for at, until in enumerate(lanes) if until <= node.index), len(lanes))
                lanes += [-1] * (lane + 1 - len(lanes))
                lanes[lane] = target
                node_lane[target] = lane
            paths.append(_path(start, node.index, lane, target))
    width = _LANE * len(lanes) + 16
    dots = "".join(
        f'<circle cx="{_x(node_lane[node.index])}" cy="{_y(node.index)}" r="4" '
        f'class="{"bad" if _nonfinite(node) else "leaf" if _leaf(node) else ""}"/>'
        for node in nodes
    )
    height = _ROW * len(nodes)
    return f'<svg width="{width}" height="{height}">{"".join(paths)}{dots}</svg>', width


def _path(lane: int, row: int, to_lane: int, to_row: int) -> str:
    x, y, to_x, to_y = _x(lane), _y(row), _x(to_lane), _y(to_row)
    if lane == to_lane:
        return f'<path d="M{x} {y}V{to_y}"/>'
    bend = y + _ROW
    return f'<path d="M{x} {y}C{x} {bend} {to_x} {y} {to_x} {bend}V{to_y}"/>'


def _x(lane: int) -> int:
    return 12 + _LANE * lane


def _y(row: int) -> int:
    return _ROW * row + _ROW // 2


def _counts(stats: GradStats | None) -> str:
    if stats is None or not stats.size:
        return '<td class="soft">–</td><td class="soft">–</td>'
    bad = f"<b>{stats.nonfinite}</b>" if stats.nonfinite else "0"
    return f"<td>{stats.zeros / stats.size:.0%}</td><td>{bad}</td>"


def _leaf(node: NodeRecord) -> bool:
    return node.op == "AccumulateGrad"


def _nonfinite(node: NodeRecord) -> bool:
    return any(stats is not None and stats.nonfinite for stats in (node.incoming, node.outgoing))
