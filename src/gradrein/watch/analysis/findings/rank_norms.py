import math

from ...run.merge import common_steps
from ...run.run import Run
from ..finding import Chart, Finding

_DIFFERENT = 1e-3
_NOISE = 1e-6


def rank_norms(run: Run) -> Finding | None:
    """Find gradients that ranks hold copies of, and that are not the same on all of them."""
    alike = [one for one in run.ranks if (one.names, one.sizes) == (run.names, run.sizes)]
    steps = common_steps(alike)
    copies = {i: groups for i in range(len(run.names)) if (groups := _copies(alike, i))}
    wrong: dict[int, list[tuple[int, float, dict[str, float]]]] = {}
    for i, groups in copies.items():
        for step, at in steps:
            for held in groups:
                norms = {f"rank {alike[r].rank}": alike[r].norms[at[r]][i] or 0.0 for r in held}
                if (gap := _gap(list(norms.values()), alike[held[0]].norm[at[held[0]]])) > _DIFFERENT:
                    wrong.setdefault(i, []).append((step, gap, norms))
    if not wrong:
        return None
    order = sorted(wrong, key=lambda i: wrong[i][0][0])
    names, first = [run.names[i] for i in order], wrong[order[0]][0]
    everything = len(wrong) == len(copies) and all(where[0][0] == steps[0][0] for where in wrong.values())
    return Finding(
        name="rank_norms",
        title=_title(names, first[0], everything),
        weight=0.97 if everything else 0.9,
        criterion=f"norms of one gradient that differ between ranks by more than {_DIFFERENT:.1%}, though the ranks "
        "hold copies of it",
        evidence={
            "parameters": names[:50],
            "first step": first[0],
            f"norms of {names[0]} there": first[2],
            "largest difference, relative": max(gap for where in wrong.values() for _, gap, _ in where),
            "share of the steps": max(len({step for step, _, _ in where}) for where in wrong.values()) / len(steps),
        },
        advice=_LEFT_ALONE if everything else _LEFT_OUT,
        chart=Chart(
            f"gradient norm of {names[0]}",
            {f"rank {one.rank}": [one.norms[at[r]][order[0]] or 0.0 for _, at in steps] for r, one in
             enumerate(alike[:3])},
            [float(step) for step, _ in steps],
            log=True,
        ),
    )  # fmt: skip


def _copies(ranks: list[Run], i: int) -> list[list[int]]:
    """Return which ranks hold the same shard of a parameter, for each shard that several hold."""
    held: dict[int, list[int]] = {}
    for r, one in enumerate(ranks):
        index, count = one.shards[i] or [0, 1]
        if count:
            held.setdefault(index, []).append(r)
    return [found for found in held.values() if len(found) > 1]


def _gap(norms: list[float], total: float) -> float:
    """Return how far apart norms are, relative to the largest; 0 where that is rounding noise of the whole gradient."""
    if not all(map(math.isfinite, norms)):
        return 0.0 if len({str(n) for n in norms}) == 1 else math.inf
    gap = max(norms) - min(norms)
    return 0.0 if gap == 0 or gap <= _NOISE * total else gap / max(norms)


def _title(names: list[str], first: int, everything: bool) -> str:
    if everything:
        return "the ranks do not train together: from the first step on, no gradient is the same on all of them"
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return f"the gradient of {names[0]}{more} is not the same on all ranks, first at step {first}"


_LEFT_ALONE = (
    "Each rank trains its own model. Wrap it in DistributedDataParallel, call the wrapped model and not the one "
    "inside, and leave `no_sync` before the last backward pass of a step. If ranks are meant to differ (stages of a "
    "pipeline that have the same names, weights averaged now and then), this is expected."
)
_LEFT_OUT = (
    "After the ranks have exchanged gradients these are equal, so some were left out: a parameter that was added or "
    "replaced after wrapping, one used outside of the wrapped forward, one unused on some ranks, or a step taken "
    "inside `no_sync`. From there on the weights of the ranks drift apart, and what rank 0 saves is only its own."
)
