"""What swinging is: one definition, for the loss of batches and for a loss on other data alike.

A loss swings when it has risen well above its lowest level and come back, and then risen again. Levels are medians of
the last `w` values for several `w`; a rise or fall counts once it exceeds 20% (or half of all progress, at least 10%)
and what noise alone would do at that `w`. Everything is causal: whether a rise counts depends on the values up to it
and on nothing later, so what is found in the first half of a run is found in the whole. Blocks play no part.

- Noise is the smallest spread of differences at lags 1, 2 and 3 over the last values: slow swings are smooth at lag 1,
  quick ones repeat themselves at lag 2 or 3, and noise does neither. A median of `w` has 1.25 / sqrt(w) of it. The
  threshold grows with sqrt(log(number of windows)), as the range of noise does.
- Positive losses are compared as logarithms. From the first value that is not positive on, the loss is compared as it
  is, and a rise has to be a quarter of all that was seen.
- A loss on other data is an average already. It is judged value by value, and what would be put down to noise is
  limited: a test loss that rises by half again and again swings, whatever makes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

_RELATIVE = math.log(1.2)
_LEAST_RELATIVE = math.log(1.1)
_MOST_NOISE = math.log(1.5)  # of a loss on other data
_OF_RANGE, _MOST_OF_RANGE = 0.25, 0.5
_FLOOR = 1e-3  # of the first values: below that a loss counts as zero
_RISES = 2
_STAGES = 3  # rises that new data may explain
_HISTORIES = (40, 200)  # values that noise is estimated from: it may have grown of late

Explain: TypeAlias = Callable[[int, int], str | None]


@dataclass(frozen=True)
class Rise:
    """A rise: the index and level of the low before it, where it was noticed, and the index and level of its peak."""

    low_at: int
    low: float
    seen_at: int
    high_at: int
    high: float


@dataclass(frozen=True)
class Swing:
    """A loss that swings.

    Attributes:
        rises: Each rise that counted, with levels in the units of the loss.
        width: How many values a level is the median of.
        since: The index at which it was established.
    """

    rises: list[Rise]
    width: int
    since: int


@dataclass(frozen=True)
class _Rule:
    """What differs between the loss of batches and a loss on other data."""

    widths: tuple[int, ...]
    noise_factor: float
    limit_noise: bool
    skip: int
    least_differences: int


_BATCHES = _Rule(tuple(7 * 3**i for i in range(10)), 2.6, False, 10, 20)
_EVALUATIONS = _Rule(tuple(3**i for i in range(7)), 1.7, True, 1, 4)


def find_swing(
    values: Sequence[float],
    *,
    batches: bool,
    explained: Explain = lambda start, end: None,  # noqa: ARG005
) -> Swing | None:
    """Find whether a loss swings.

    Args:
        values: The loss, all finite.
        batches: Whether these are losses of single batches, each with noise of its own.
        explained: What else accounts for a rise between two indices, where the values of the low begin and where the
            rise was noticed: "schedule", "data", or None. Of the latter, three are no swing; more are.

    Returns:
        The swing at the finest width that shows it, or None.
    """
    rule = _BATCHES if batches else _EVALUATIONS
    end = next((i for i, v in enumerate(values) if v <= 0), len(values))
    found = _search(values[:end], rule, explained, log=True)
    if found is None and end < len(values):
        found = _search(values, rule, explained, log=False)
    return found


def _search(values: Sequence[float], rule: _Rule, explained: Explain, log: bool) -> Swing | None:
    floor = _FLOOR * median(values[:3]) if log and values else 0.0
    ys = [math.log(v + floor) for v in values] if log else list(values)
    noise = _noise(ys, rule)
    for width in rule.widths:
        if len(ys) < 6 * width:
            break
        found = _zigzag(ys, noise, width, rule, log)
        causes = [explained(max(0, r.low_at - width + 1), r.seen_at) for r in found]
        often = causes.count("data") > _STAGES
        rises = [r for r, cause in zip(found, causes, strict=True) if cause is None or (cause == "data" and often)]
        if len(rises) >= _RISES:
            scaled = [_in_units(r, floor) for r in rises] if log else rises
            return Swing(scaled, width, rises[_RISES - 1].seen_at)
    return None


def _in_units(r: Rise, floor: float) -> Rise:
    return Rise(r.low_at, math.exp(r.low) - floor, r.seen_at, r.high_at, math.exp(r.high) - floor)


def _noise(ys: Sequence[float], rule: _Rule) -> list[float]:
    """Return for each index the noise of a value there, from the values up to it; infinite while these are too few."""
    found: list[float] = []
    for i in range(len(ys)):
        if i % 10 and i > _HISTORIES[0]:  # often enough, and the same however long the run becomes
            found.append(found[-1])
            continue
        found.append(max(_least_spread(ys[max(0, i - n) : i + 1], rule) for n in _HISTORIES))
    return found


def _least_spread(past: Sequence[float], rule: _Rule) -> float:
    return min((_spread(past, n) for n in (1, 2, 3) if len(past) - n >= rule.least_differences), default=math.inf)


def _spread(past: Sequence[float], lag: int) -> float:
    """Return the standard deviation of the values from their differences: of the middle half, or of the tails."""
    differences = [b - a for a, b in zip(past, past[lag:], strict=False)]
    middle = median(differences)
    sizes = sorted(abs(d - middle) for d in differences)
    tail = sizes[int(0.9 * (len(sizes) - 1))] / 1.645
    return max(1.4826 * median(sizes), tail) / math.sqrt(2)


def _levels(ys: Sequence[float], width: int, skip: int) -> list[tuple[int, float]]:
    """Return (index, median of the last `width` values), at each index or at nine in a width."""
    stride = max(1, width // 9)
    first = (max(width, skip) + stride - 1) // stride * stride
    return [(i - 1, median(ys[i - width : i])) for i in range(first, len(ys) + 1, stride)]


def _zigzag(ys: Sequence[float], noise: Sequence[float], width: int, rule: _Rule, log: bool) -> list[Rise]:
    """Return the rises that exceed the threshold, each after a fall that does."""
    levels = _levels(ys, width, rule.skip)
    if not levels:
        return []
    found: list[Rise] = []
    start = lowest = highest = levels[0][1]
    turn, level_at_turn, falling = levels[0][0], start, True
    for i, level in levels:
        lowest, highest = min(lowest, level), max(highest, level)
        spread = (1.0 if width == 1 else 1.25 / math.sqrt(width)) * max(noise[i], noise[turn])
        limit = spread * rule.noise_factor * math.sqrt(2 * math.log(i / width + 8))
        least = _least_rise(start - lowest, highest - lowest, log)
        if rule.limit_noise:
            limit = min(limit, _MOST_NOISE if log else _MOST_OF_RANGE * (highest - lowest))
        limit = max(limit, least)
        if falling and level - level_at_turn > limit:
            found.append(Rise(turn, level_at_turn, i, i, level))
        elif not falling and level_at_turn - level <= limit:
            if level > level_at_turn:
                turn, level_at_turn = i, level
                found[-1] = Rise(found[-1].low_at, found[-1].low, found[-1].seen_at, i, level)
            continue
        elif falling:
            if level < level_at_turn:
                turn, level_at_turn = i, level
            continue
        falling = not falling
        turn, level_at_turn = i, level
    return found


def _least_rise(progress: float, seen: float, log: bool) -> float:
    if not log:
        return _OF_RANGE * seen
    return min(_RELATIVE, max(_LEAST_RELATIVE, 0.5 * progress))
