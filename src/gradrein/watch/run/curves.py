"""Losses on other data in a record, as curves with where each came from."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from .values import number, text

# Where a curve is known from several places, the first of these is kept.
ORIGINS = ("noted", "trainer", "TensorBoard", "wandb", "printed", "no_grad")
_LEAST = 3  # points of a curve that was read, not given: two could be anything
_OTHER_DATA = frozenset(["test", "val", "valid", "validation", "eval", "evaluation", "dev"])
_CLOSE = 0.25  # how far a printed training loss may be from that of the steps
_FACTOR = 4.0  # how far a number that no one has named a loss may be from the training loss


@dataclass(frozen=True)
class Curve:
    """A loss on other data than the training batches.

    Attributes:
        name: Such as "val loss".
        origin: Where it was read: one of `ORIGINS`.
        steps: How many steps had been taken before each value.
        values: The values; NaN and infinities included.
    """

    name: str
    origin: str
    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.values)


def curves_of(notes: Sequence[dict[str, Any]], steps: Sequence[int], loss: Sequence[float]) -> list[Curve]:
    """Return the curves in a record, the most direct origin first; each loss once.

    Args:
        notes: The lines that are no steps.
        steps: The steps of the run.
        loss: The training loss at each.
    """
    by_origin: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in notes:
        if "curve" in line:
            by_origin.setdefault((text(line["curve"]), text(line.get("origin", ""))), []).append(line)
        elif str(line.get("note", "")).lower() in _OTHER_DATA and "loss" in line:
            by_origin.setdefault((text(line["note"]), "noted"), []).append({**line, "value": line["loss"]})
    kept: list[Curve] = []
    for (name, origin), lines in sorted(by_origin.items(), key=lambda item: _rank(item[0][1])):
        curve = Curve(name, origin, [n["after"] for n in lines], [number(n.get("value")) for n in lines])
        trained = Curve("train", origin, curve.steps, [number(n.get("train")) for n in lines])
        is_named = not any("unnamed" in n for n in lines) or _follows(trained, steps, loss)
        if _is_one(curve, is_named, steps, loss) and not any(_same(curve, k) for k in kept):
            kept.append(curve)
    return kept


def _rank(origin: str) -> int:
    return ORIGINS.index(origin) if origin in ORIGINS else len(ORIGINS)


def _is_one(curve: Curve, is_named: bool, steps: Sequence[int], loss: Sequence[float]) -> bool:
    if curve.origin == "noted":
        return True
    if len(curve) < _LEAST or (curve.origin == "no_grad" and 2 * len(curve) > len(steps)):
        return False
    if all(value == curve.values[0] for value in curve.values):  # such as the best so far, again and again
        return False
    return is_named or _resembles(curve, steps, loss)


def _follows(trained: Curve, steps: Sequence[int], loss: Sequence[float]) -> bool:
    """Return whether what was printed for the training data is the training loss since it was printed before."""
    close = known = 0
    before = -1
    for step, value in zip(trained.steps, trained.values, strict=True):
        near = loss[bisect_left(steps, before) : bisect_left(steps, step)]
        before = step
        if near and math.isfinite(value) and all(map(math.isfinite, near)):
            known += 1
            close += any(abs(value - v) <= _CLOSE * abs(v) for v in (fmean(near), median(near), near[-1]))
    return known >= _LEAST and 2 * close > known


def _resembles(curve: Curve, steps: Sequence[int], loss: Sequence[float]) -> bool:
    """Return whether numbers that nobody has named are of the size of the training loss, and go its way."""
    pairs = []
    before = -1
    for step, value in zip(curve.steps, curve.values, strict=True):
        near = [v for v in loss[bisect_left(steps, before) : bisect_left(steps, step)] if math.isfinite(v)]
        if near and math.isfinite(value):
            pairs.append((value, median(near), fmean(near)))
        before = step
    first = pairs[: max(3, len(pairs) // 4)]
    close = [any(t > 0 and t / _FACTOR <= v <= t * _FACTOR for t in trained) for v, *trained in first]
    apart = [(v - pairs[0][0]) * (t - pairs[0][1]) for v, t, _ in pairs[1:]]
    opposite = sum(1 for product in apart if product < 0)
    return sum(close) * 2 > len(first) > 2 and opposite * 4 < 3 * len(apart)


def _same(curve: Curve, other: Curve) -> bool:
    known = dict(zip(other.steps, other.values, strict=True))
    shared = [(v, known[s]) for s, v in zip(curve.steps, curve.values, strict=True) if s in known]
    close = sum(1 for a, b in shared if a == b or abs(a - b) <= 0.02 * max(abs(a), abs(b)) or (a != a and b != b))
    return len(shared) * 2 >= len(curve) and close * 5 >= 4 * len(shared) > 0
