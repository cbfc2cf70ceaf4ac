"""Charts as HTML: an SVG that stretches to any width, with labels of fixed size beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from ..analysis.statistics import finite

_FEW = 60
_COLUMNS = 500  # points drawn across; of more, the lowest and highest in each column


Points: TypeAlias = Sequence[tuple[float, float]]
Line: TypeAlias = tuple[str, Points, str]
"""A name for the legend, (x, y) pairs, and the CSS class that colours it; a few points are drawn as dots too."""


@dataclass(frozen=True)
class Axis:
    """A range of numbers laid out from 0 to 1."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], log: bool = False) -> "Axis":
        """Return an axis that holds all finite values (those above 0, if logarithmic)."""
        kept = [v for v in finite(values) if v > 0 or not log]
        low, high = (min(kept), max(kept)) if kept else (1.0, 10.0)
        if log:
            high = max(high, 1e-290)  # so that what is below it is not zero
            low = max(low, high * 1e-8)  # a single zero-like value must not flatten all others
            return cls(low / 1.15, high * 1.15, True)
        if high - low < 1e-12 * max(abs(high), abs(low)) or high - low < 1e-300:  # no digits to tell them apart
            gap = abs(high) * 0.1 if abs(high) > 1e-300 else 1.0
        else:
            gap = 0.05 * (high - low)
        return cls(low - gap, high + gap, False)

    def position(self, v: float) -> float:
        """Return where a value lies, limited to the range."""
        if self.log:
            at = math.log(max(v, self.low) / self.low) / math.log(self.high / self.low)
        else:
            at = (v - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, at))

    def ticks(self, about: int = 5) -> list[float]:
        """Return round values inside the range."""
        if self.log and self.high / self.low > 10:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            if last - first < 2:
                several = (m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5))
                return [v for v in several if self.low <= v <= self.high]
            step = max(1, round((last - first) / about))
            return [10.0**e for e in range(first, last + 1, step)]
        raw = (self.high - self.low) / about
        size = 10 ** math.floor(math.log10(raw))
        step_size = next(size * m for m in (1, 2, 5, 10) if size * m >= raw)
        first_tick = math.ceil(self.low / step_size)
        return [i * step_size for i in range(first_tick, math.floor(self.high / step_size) + 1)]


def lines(
    series: Sequence[Line],
    *,
    log: bool = False,
    marks: Sequence[float] = (),
    levels: Sequence[tuple[str, float]] = (),
    x_label: str = "step",
) -> str:
    """Draw lines over steps; `marks` are vertical lines, `levels` named horizontal ones."""
    points = [point for _, each, _ in series for point in each]
    xs = Axis.around([x for x, _ in points])
    xs = Axis(min((x for x, _ in points), default=0), xs.high - 0.05 * (xs.high - xs.low) / 1.1)
    ys = Axis.around([y for _, y in points] + [v for _, v in levels], log)
    drawn = [_across("grid", v, ys) for v in ys.ticks()]
    drawn += [
        f'<line class="mark" x1="{_p(xs.position(m))}" x2="{_p(xs.position(m))}" y1="0" y2="1000"/>'
        for m in marks[:200]
    ]
    drawn += [_across("level", v, ys) for _, v in levels]
    drawn += [_path(each, style, xs, ys) for _, each, style in series]
    names = [_tag("at", v, ys, name) for name, v in levels]
    legend = _legend(series) if len(series) > 1 else ""
    return legend + _frame("".join(drawn), xs, ys, "".join(names), x_label)


def _frame(svg: str, xs: Axis, ys: Axis, extra: str, x_label: str) -> str:
    left = "".join(_tag("y", v, ys, _short(v)) for v in ys.ticks())
    foot = "".join(f'<span class="x" style="left:{100 * xs.position(v):.2f}%">{_short(v)}</span>' for v in xs.ticks())
    return (
        f'<div class="plot"><div class="ys">{left}</div><div class="area">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{svg}</svg>{extra}</div>'
        f'<div class="xs">{foot}</div><div class="xl">{escape(x_label)}</div></div>'
    )


def _tag(kind: str, v: float, ys: Axis, text: str) -> str:
    return f'<span class="{kind}" style="top:{100 - 100 * ys.position(v):.2f}%">{escape(text)}</span>'


def _across(kind: str, v: float, ys: Axis) -> str:
    y = _p(1 - ys.position(v))
    return f'<line class="{kind}" x1="0" x2="1000" y1="{y}" y2="{y}"/>'


def _path(points: Points, style: str, xs: Axis, ys: Axis) -> str:
    kept = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not ys.log)]
    at = [(1000 * xs.position(x), 1000 - 1000 * ys.position(y)) for x, y in _thinned(kept)]
    if not at:
        return ""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    # A path of zero length with round caps is a dot that stays round however the chart is stretched.
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in at) if len(at) <= _FEW else ""
    return f'<path class="line {style}" d="{d}"/>' + (f'<path class="dots {style}" d="{dots}"/>' if dots else "")


def _thinned(points: Points) -> list[tuple[float, float]]:
    if len(points) <= 2 * _COLUMNS:
        return list(points)
    kept: list[tuple[float, float]] = []
    for i in range(_COLUMNS):
        part = points[i * len(points) // _COLUMNS : (i + 1) * len(points) // _COLUMNS]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _legend(series: Sequence[Line]) -> str:
    return (
        '<p class="legend">'
        + "".join(f'<span class="{style}">{escape(name)}</span>' for name, _, style in series)
        + "</p>"
    )


def _p(at: float) -> str:
    return f"{1000 * at:.1f}"


def _short(v: float) -> str:
    if v != 0 and not 1e-3 <= abs(v) < 1e5:
        return f"{v:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{v:.4g}"
