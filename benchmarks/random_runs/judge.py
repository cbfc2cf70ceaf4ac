"""What is true of a run: whether one of eight simple alternatives would have ended better, by both seeds alike."""

from __future__ import annotations

import math
from typing import Any

EIGHT = ("clip 3", "clip 1", "clip 1/3", "clip 1/10", "lr 1/3", "lr 1/10", "lr 1/30", "clip 1, lr 1/3")
NEEDS, FINE, HARMED = 2 / 3, 0.9, 1.25


def best_of_eight(seed: dict[str, Any]) -> float:
    """Return what the best of the eight ends with; infinity if all are not finite."""
    return min((v for name in EIGHT if (v := seed["ways"][name]) is not None), default=math.inf)


def truth_of_seed(seed: dict[str, Any]) -> str:
    """Return "help", "fine", or "between" where neither can be said."""
    if seed["base"] is None:
        return "help"
    ratio = best_of_eight(seed) / seed["base"]
    return "help" if ratio < NEEDS else "fine" if ratio >= FINE else "between"


def truth(line: dict[str, Any]) -> str:
    """Return the same of a task, where both seeds agree."""
    found = {truth_of_seed(seed) for seed in line["seeds"]}
    return found.pop() if len(found) == 1 else "between"


def end_of(seed: dict[str, Any], way: str | None) -> float:
    """Return what a way ends with, None being the run as it is; infinity where it is not finite."""
    value = seed["base"] if way is None else seed["ways"][way]
    return math.inf if value is None else value


def helps_by(seed: dict[str, Any], end: float) -> bool:
    """Return whether an end is better by a third; of a run that is not finite, below where it began."""
    before = seed["first"] if seed["base"] is None else NEEDS * seed["base"]
    return end < (before if math.isfinite(before) else 1e6)


def over_best(seed: dict[str, Any], way: str | None) -> float:
    """Return the end over that of the best of the eight, at most a hundred times."""
    best = best_of_eight(seed)
    return min(100.0, max(end_of(seed, way), 1e-12) / max(best, 1e-12)) if math.isfinite(best) else 1.0


def interval(hits: float, of: float) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, hits / of
    middle, width = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return max(0.0, (middle - width) / (1 + z * z / of)), min(1.0, (middle + width) / (1 + z * z / of))
