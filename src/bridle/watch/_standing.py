"""How the ranks of a run stood: what each did, and what was not in order."""

from __future__ import annotations

import math
from statistics import median

from ._run import Run
from ._stats import finite

__all__ = ["remarks", "standing"]


def standing(run: Run) -> list[dict[str, float | str]]:
    """A row for each rank that left a record, in numbers and words."""
    return [
        {
            "rank": one.rank,
            "steps": sum(one.of),
            "last loss": finite(one.loss)[-1] if finite(one.loss) else math.nan,
            "median gradient norm": _middle(one.norm),
            "seconds outside backward": _middle(one.own),
            "seconds loading data": _middle(one.load),
            "seconds in backward": _middle(one.back),
            "end": "in order" if one.end == "" else one.end or "not recorded",
        }
        for one in run.ranks
    ]


def _middle(values: list[float]) -> float:
    known = finite(values)
    return median(known) if known else math.nan


def remarks(run: Run) -> list[str]:
    """Sentences about what is missing, so that nobody takes a part of a run for all of it."""
    found = [f"Rank {rank} left no record of this run." for rank in run.missing]
    for one in run.ranks:
        if one.end is None:
            found.append(
                f"Rank {one.rank} stopped early: its record breaks off after {sum(one.of)} steps. It was killed, left "
                "at once, or is still running."
            )
        elif one.end:
            found.append(f"Rank {one.rank} stopped early, after {sum(one.of)} steps: {one.end}.")
    for note in run.notes if run.ranks else ():
        if "stopped" in note:
            rank = note.get("rank", run.rank)
            found.append(f"Recording of rank {rank} stopped after {note['after']} steps: {note['stopped']}.")
    reasons: dict[str, list[str]] = {}
    for name, why in run.unmeasured.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found.append(f"Not measured: the gradient of {', '.join(names[:3])}{more}. Why: {why}.")
    return found
