"""Statistics of plain lists of numbers; NaN and infinities are left out."""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from statistics import fmean


def finite(values: Sequence[float]) -> list[float]:
    """Return the values that are finite."""
    return [v for v in values if math.isfinite(v)]


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile, linear between neighbours; NaN of nothing."""
    ordered = sorted(finite(values))
    if not ordered:
        return math.nan
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def running_median(values: Sequence[float], width: int) -> list[float]:
    """Return the median of the `width` values around each (fewer at the ends), of those that are finite."""
    half = width // 2
    window: list[float] = []  # in order: a step moves one value in and one out
    medians = []
    for i in range(-half, len(values)):
        if i + half < len(values) and math.isfinite(values[i + half]):
            insort(window, values[i + half])
        if i > half and math.isfinite(values[i - half - 1]):
            window.pop(bisect_left(window, values[i - half - 1]))
        if i >= 0:
            medians.append(_middle(window))
    return medians


def _middle(ordered: list[float]) -> float:
    at = len(ordered) // 2
    if not ordered:
        return math.nan
    return ordered[at] if len(ordered) % 2 else (ordered[at - 1] + ordered[at]) / 2


def relative(values: Sequence[float], width: int) -> list[float]:
    """Return the logarithm of each value over the running median: the trend is removed."""
    trend = running_median(values, width)
    return [
        math.log(v) - math.log(t) if v > 0 and t > 0 and v < math.inf else math.nan
        for v, t in zip(values, trend, strict=True)
    ]


def late_fall(values: Sequence[float]) -> float:
    """Return by how much values above zero fall at the end: the log of the fifth before the last over the last."""
    fifth = max(1, len(values) // 5)
    return math.log(fmean(values[-2 * fifth : -fifth])) - math.log(fmean(values[-fifth:]))


def slope(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares slope of y on x, and the correlation."""
    if len(xs) < 2:
        return math.nan, math.nan
    mx, my = fmean(xs), fmean(ys)
    sxx = sum((x - mx) ** 2 for x in xs)
    syy = sum((y - my) ** 2 for y in ys)
    sxy = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    if sxx == 0 or syy == 0:
        return 0.0, 0.0
    return sxy / sxx, sxy / math.sqrt(sxx * syy)
