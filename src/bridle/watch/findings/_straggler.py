from __future__ import annotations

import math
from statistics import median, median_low

from .._finding import Finding, Picture
from .._merge import common_steps, is_cut
from .._run import Run

__all__ = ["straggler"]

_LEAST = 20
_SHARE = 0.2
_OFTEN = 0.8


def straggler(run: Run) -> Finding | None:
    """A rank that needs longer by itself than the others, who wait for it in the backward pass.

    Where parameters lie on several ranks these wait for each other in the forward pass too, and nothing can be told.
    """
    shared = common_steps(run.ranks)
    timed = [
        (step, at)
        for step, at in shared
        if all(math.isfinite(one.own[t]) for one, t in zip(run.ranks, at, strict=True))
    ]
    if len(run.ranks) < 2 or len(timed) < _LEAST or any(is_cut(piece) for piece in run.pieces):
        return None
    own = [[one.own[at[r]] for _, at in timed] for r, one in enumerate(run.ranks)]
    back = [[one.back[at[r]] for _, at in timed] for r, one in enumerate(run.ranks)]
    usual = [median_low(each) for each in zip(*own, strict=True)]  # of two ranks the faster
    length = median(a + b for mine, waits in zip(own, back, strict=True) for a, b in zip(mine, waits, strict=True))
    shortest_wait = median_low([median(waits) for waits in back])
    late: dict[int, float] = {}
    for r, mine in enumerate(own):
        lost = [m - u for m, u in zip(mine, usual, strict=True)]
        often = sum(1 for gap in lost if gap > 0) >= _OFTEN * len(lost)
        if often and median(lost) > _SHARE * length and median(back[r]) <= shortest_wait:
            late[r] = median(lost)
    if not late:
        return None
    names, most = [f"rank {run.ranks[r].rank}" for r in late], max(late.values())
    return Finding(
        name="straggler",
        title=f"{' and '.join(names)} {'is' if len(late) == 1 else 'are'} late: the others wait {most:.3g} s in each "
        f"step, {most / length:.0%} of its time",
        weight=min(0.85, 0.3 + 0.5 * most / length),
        test="seconds outside of backward passes, where ranks do not wait for each other: more than usual among the "
        f"ranks by {_SHARE:.0%} of a step, in {_OFTEN:.0%} of the steps; and not more inside, where they do wait",
        evidence={
            "seconds outside backward": _by_rank(run, own),
            "seconds in backward, with waiting": _by_rank(run, back),
            "seconds of a step": length,
            "steps compared": len(timed),
        },
        advice="Between a step and the next backward pass lie data loading, the forward pass and what else the script "
        "does: look there, on that rank. Uneven shards of the data, the longest sequences, too few loader workers, "
        "logging or saving on one rank only, a slower machine.",
        picture=Picture(
            "seconds outside of backward passes",
            {"usual": usual, **{name: own[r] for name, r in zip(names[:2], late, strict=False)}},
            [float(step) for step, _ in timed],
        ),
    )


def _by_rank(run: Run, times: list[list[float]]) -> dict[str, float]:
    return {f"rank {one.rank}": median(each) for one, each in zip(run.ranks, times, strict=True)}
