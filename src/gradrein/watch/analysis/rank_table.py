"""The ranks of a run: what each did, and what was not in order."""

import math
from statistics import median

from ..run.run import Run
from .statistics import finite


def rank_table(run: Run) -> list[dict[str, float | str]]:
    """Return a row for each rank that left a record."""
    return [
        {
            "rank": one.rank,
            "steps": sum(one.n_steps),
            "last loss": finite(one.loss)[-1] if finite(one.loss) else math.nan,
            "median gradient norm": _median(one.norm),
            "end": "in order" if one.end == "" else one.end or "not recorded",
        }
        for one in run.ranks
    ]


def _median(values: list[float]) -> float:
    known = finite(values)
    return median(known) if known else math.nan


def _missing(ranks: list[int]) -> list[str]:
    if len(ranks) <= 8:
        return [f"Rank {rank} left no record of this run." for rank in ranks]
    some = ", ".join(map(str, ranks[:8]))
    return [f"{len(ranks)} ranks left no record of this run: {some} and {len(ranks) - 8} more."]


def _of_rank(one: Run, run: Run) -> list[str]:
    return [f"Rank {one.rank}: {warning}" for warning in one.warnings if warning not in run.warnings]


def warnings(run: Run) -> list[str]:
    """Return sentences about what is missing from the record."""
    sentences = [*run.warnings, *(warning for one in run.ranks for warning in _of_rank(one, run))]
    sentences += _missing(run.missing_ranks)
    for one in run.ranks:
        if one.end is None:
            sentences.append(
                f"Rank {one.rank} stopped early: its record breaks off after {sum(one.n_steps)} steps. It was killed, "
                "exited at once, or is still running."
            )
        elif one.end:
            sentences.append(f"Rank {one.rank} stopped early, after {sum(one.n_steps)} steps: {one.end}.")
    for note in run.notes:
        if "stopped" in note:
            rank = f" of rank {note.get('rank', run.rank)}" if run.ranks else ""
            sentences.append(f"Recording{rank} stopped after {note['after']} steps: {note['stopped']}.")
    reasons: dict[str, list[str]] = {}
    for name, why in run.unmeasured.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        sentences.append(f"Not measured: the gradient of {', '.join(names[:3])}{more}. Why: {why}.")
    return sentences
