import math
from statistics import median, median_low

from ...run.merge import common_steps, is_sharded
from ...run.run import Run
from ..finding import Chart, Finding

_LEAST = 20
_SHARE = 0.2
_OFTEN = 0.8
_TOGETHER = 1.25


def straggler(run: Run) -> Finding | None:
    """Find a rank that needs longer by itself than the others, which wait for it.

    In the backward pass all wait. Where parameters are sharded they wait in the forward pass too, and only the time
    for loading data is a rank's own.
    """
    timed = [(step, at) for step, at in common_steps(run.ranks) if _is_timed(run, at)]
    if len(run.ranks) < 2 or len(timed) < _LEAST:
        return None
    own = [[one.host_s[at[r]] for _, at in timed] for r, one in enumerate(run.ranks)]
    back = [[one.backward_s[at[r]] for _, at in timed] for r, one in enumerate(run.ranks)]
    load = [[one.data_s[at[r]] for _, at in timed] for r, one in enumerate(run.ranks)]
    lengths = [median(a + b for a, b in zip(*pair, strict=True)) for pair in zip(own, back, strict=True)]
    if max(lengths) > _TOGETHER * min(lengths):
        return None  # their steps differ in length: no rank waits for another
    measured = {"outside of backward passes": own, "loading data": load}
    if any(is_sharded(shard) for shard in run.shards):
        del measured["outside of backward passes"]
    length = median(lengths)
    evidence = {
        "seconds outside backward": _by_rank(run, own),
        "seconds loading data": _by_rank(run, load),
        "seconds in backward, with waiting": _by_rank(run, back),
        "seconds of a step": length,
        "steps compared": len(timed),
    }
    for where, times in measured.items():
        if late := _late(times, length):
            names = [f"rank {run.ranks[r].rank}" for r in late]
            lines = {"usual": _usual(times), **{name: times[r] for name, r in zip(names[:2], late, strict=False)}}
            chart = Chart(f"seconds {where}", lines, [float(step) for step, _ in timed])
            return _finding(names, max(late.values()), length, where, evidence, chart)
    return None


def _is_timed(run: Run, at: list[int]) -> bool:
    return all(
        math.isfinite(one.host_s[t] + one.backward_s[t] + one.data_s[t]) for one, t in zip(run.ranks, at, strict=True)
    )


def _usual(times: list[list[float]]) -> list[float]:
    return [median_low(each) for each in zip(*times, strict=True)]  # of two ranks the faster


def _late(times: list[list[float]], length: float) -> dict[int, float]:
    """Return how much longer ranks need, where it is a good part of a step in nearly all steps."""
    usual = _usual(times)
    found = {}
    for r, mine in enumerate(times):
        more = [m - u for m, u in zip(mine, usual, strict=True)]
        if median(more) > _SHARE * length and sum(1 for m in more if m > 0) >= _OFTEN * len(more):
            found[r] = median(more)
    return found


def _finding(
    names: list[str], lost: float, length: float, where: str, evidence: dict[str, object], chart: Chart
) -> Finding:
    return Finding(
        name="straggler",
        title=f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} late: the others wait {lost:.3g} s in each "
        f"step, {lost / length:.0%} of its time",
        weight=min(0.85, 0.3 + 0.5 * lost / length),
        criterion=f"seconds {where}, where ranks do not wait for each other: more than usual among the ranks by "
        f"{_SHARE:.0%} of a step, in {_OFTEN:.0%} of the steps, while all take equally long for a step",
        evidence=evidence,
        advice="Between a step and the next backward pass lie data loading, the forward pass and what else the script "
        "does: look there, on that rank. Uneven shards of the data, the longest sequences, too few loader workers, "
        "logging or saving on one rank only, a slower machine.",
        chart=chart,
    )


def _by_rank(run: Run, times: list[list[float]]) -> dict[str, float]:
    return {f"rank {one.rank}": median(each) for one, each in zip(run.ranks, times, strict=True)}
