"""Statistics of plain lists of numbers; NaN and infinities are left out."""

import math
from collections.abc import Sequence
from statistics import fmean, median


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


def mad(values: Sequence[float]) -> float:
    """Return the median absolute deviation, scaled to equal the standard deviation of a normal sample."""
    kept = finite(values)
    if not kept:
        return math.nan
    middle = median(kept)
    return 1.4826 * median(abs(v - middle) for v in kept)


def running_median(values: Sequence[float], width: int) -> list[float]:
    """Return the median of the `width` values around each (fewer at the ends), of those that are finite."""
    half = width // 2
    found = []
    for i in range(len(values)):
        near = finite(values[max(0, i - half) : i + half + 1])
        found.append(median(near) if near else math.nan)
    return found


def relative(values: Sequence[float], width: int) -> list[float]:
    """Return the logarithm of each value over the running median: the trend is removed."""
    trend = running_median(values, width)
    return [
        math.log(v / t) if v > 0 and t > 0 and v < math.inf else math.nan for v, t in zip(values, trend, strict=True)
    ]


def autocorrelation(values: Sequence[float], lag: int) -> float:
    """Return the correlation of a series with itself `lag` values later."""
    n = len(values)
    if lag <= 0 or n - lag < 3:
        return math.nan
    middle = fmean(values)
    variance = sum((v - middle) ** 2 for v in values)
    if variance == 0:
        return 0.0
    shared = sum((a - middle) * (b - middle) for a, b in zip(values, values[lag:], strict=False))
    return shared / variance * n / (n - lag)


def hill(values: Sequence[float], k: int) -> float:
    """Return Hill's estimate of the tail index from the k largest values: P(X > x) falls as x ** -index."""
    top = sorted(v for v in finite(values) if v > 0)[-(k + 1) :]
    if len(top) < k + 1:
        return math.nan
    excess = fmean(math.log(v / top[0]) for v in top[1:])
    return 1 / excess if excess > 0 else math.inf


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
