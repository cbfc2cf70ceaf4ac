"""Small pictures for notebooks: what `_repr_html_` of a result returns. Everything that is shown is escaped."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _ROW = 480, 120, 18
_COLOURS = ("#2563c9", "#d2691e", "#3b8f5b", "#8a5cc2")
_MOST_POINTS = 400
# Columns stay columns in JupyterLab and nbconvert, and colours are those of the page, light or dark.
_PRE = "margin:.3em 0;font:85%/1.35 monospace;white-space:pre;overflow-x:auto;color:inherit;background:none"


def card(title: str, picture: str = "", text: str = "") -> str:
    """Return a title, a picture and preformatted text."""
    pre = f'<pre style="{_PRE}">{escape(printable(text))}</pre>' if text else ""
    return f'<div style="font-family:sans-serif"><b>{escape(printable(title))}</b>{picture}{pre}</div>'


def table(rows: Mapping[str, object]) -> str:
    """Draw names and values, numbers in few digits."""
    shown = {name: _short(v) if isinstance(v, float) else str(v) for name, v in rows.items()}
    cells = (f"<tr><td>{_escaped(name)}</td><td>{_escaped(text)}</td></tr>" for name, text in shown.items())
    return f"<table>{''.join(cells)}</table>"


class Lines(str):
    """Text of several lines, which a notebook shows as such."""

    def _repr_html_(self) -> str:
        return card("", text=self)


def printable(text: str) -> str:
    """Return text that any encoding of a page can hold."""
    return text.encode("utf-8", "replace").decode()


def curves(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """Draw each line, a name and points, on a scale of its own, logarithmic where all its values are positive."""
    drawn = [(name, kept) for name, points in lines if (kept := _finite(points))]
    if not drawn:
        return ""
    parts = []
    for (name, points), colour in zip(drawn, _COLOURS, strict=False):
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _placed(points))
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        ends = f"{name}: {_short(min(y for _, y in points))} to {_short(max(y for _, y in points))}"
        at = 14 * len(parts) // 2
        parts.append(f'<text x="{_WIDTH - 4}" y="{at + 8}" text-anchor="end" fill="{colour}">{_escaped(ends)}</text>')
    return _svg(_HEIGHT, "".join(parts))


def bars(before: Mapping[str, float], after: Mapping[str, float] | None = None, most: int = 10) -> str:
    """Draw a bar for each of the largest; with `after`, a darker one for what is left of it."""
    size = lambda item: -item[1] if math.isfinite(item[1]) else -math.inf  # noqa: E731
    chosen = sorted(before.items(), key=size)[:most]
    top = max((v for _, v in chosen if math.isfinite(v)), default=0.0)
    parts = []
    for i, (name, v) in enumerate(chosen):
        y, left = _ROW * i, 0.0 if after is None else after.get(name, 0.0)
        colour = _COLOURS[0] if math.isfinite(v) else "#b3261e"
        parts.append(_bar(y, _share(v, top), colour, 1.0 if after is None else 0.35))
        if after is not None:
            parts.append(_bar(y, _share(left, top), colour, 1.0))
        label = _short(v) if after is None else f"{_short(v)} to {_short(left)}"
        parts.append(f'<text x="4" y="{y + 13}">{_escaped(name[-40:])}</text>')
        parts.append(f'<text x="{_WIDTH - 4}" y="{y + 13}" text-anchor="end">{label}</text>')
    return _svg(_ROW * len(chosen), "".join(parts)) if chosen else ""


def histogram(values: Sequence[float], bins: int = 40) -> str:
    """Draw how often each size occurs, and name the sample with the largest."""
    kept = [v for v in values if math.isfinite(v)]
    if not kept:
        return ""
    low, high = min(kept), max(kept)
    counts = [0] * bins
    for v in kept:
        counts[min(bins - 1, int(_between(v, low, high) * bins))] += 1
    top, width = max(counts), _WIDTH / bins
    parts = [
        f'<rect x="{i * width:.1f}" y="{100 - 96 * n / top:.1f}" width="{width - 1:.1f}" height="{96 * n / top:.1f}" '
        f'fill="{_COLOURS[0]}"/>'
        for i, n in enumerate(counts)
        if n
    ]
    parts.append(f'<text x="0" y="114">{_short(low)}</text>')
    largest = f"{_short(high)} (sample {list(values).index(high)})"
    parts.append(f'<text x="{_WIDTH}" y="114" text-anchor="end">{largest}</text>')
    return _svg(_HEIGHT, "".join(parts))


def _svg(height: int, content: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" font-size="11" fill="currentColor" '
        f'style="display:block;margin:.3em 0">{content}</svg>'
    )


def _bar(y: int, share: float, colour: str, opacity: float) -> str:
    width = max(1.0, (_WIDTH * 0.55) * share)
    return (
        f'<rect x="{_WIDTH * 0.2:.0f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}" '
        f'opacity="{opacity * 0.6:.2f}"/>'
    )


def _share(v: float, top: float) -> float:
    return 1.0 if not math.isfinite(v) else max(0.0, v / top) if top > 0 else 0.0


def _between(v: float, low: float, high: float) -> float:
    return (v / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5  # halves do not overflow


def _placed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) > _MOST_POINTS:
        points = [points[i * len(points) // _MOST_POINTS] for i in range(_MOST_POINTS)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if min(ys) > 0:
        ys = [math.log(y) for y in ys]
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (min(ys), max(ys))
    return [
        (_WIDTH * _between(x, x0, x1), 4 + (_HEIGHT - 8) * (1 - _between(y, y0, y1)))
        for x, y in zip(xs, ys, strict=True)
    ]


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _short(v: float) -> str:
    return f"{v:.3g}"


def _escaped(text: str) -> str:
    return escape(printable(text))
