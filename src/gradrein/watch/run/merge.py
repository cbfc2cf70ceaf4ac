"""Merge the runs of several ranks into one.

What ranks hold copies of is taken from the lowest. Shards are put together from all ranks, each shard once; where one
is missing the whole is not known, and NaN stands for it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

from .run import NonfiniteStep, Run

_Sources: TypeAlias = list[tuple[Run, int]]  # where the shards of a parameter are: a run, and the index in it


def common_steps(runs: Sequence[Run]) -> list[tuple[int, list[int]]]:
    """Return the steps that all of these runs recorded, each with its row in every one of them."""
    rows = [{step: t for t, step in enumerate(run.steps)} for run in runs]
    return [(step, [row[step] for row in rows]) for step in rows[0] if all(step in row for row in rows)] if rows else []


def merge_ranks(runs: list[Run]) -> Run:
    """Return one run from those of several ranks, which are in the order of their ranks."""
    first = runs[0]
    notes = [*first.notes, *({**n, "rank": run.rank} for run in runs[1:] for n in run.notes if _concerns_all(n))]
    whole = dataclasses.replace(first, ranks=tuple(runs), notes=notes, nonfinite=_nonfinite(runs))
    if not any(is_sharded(shard) for run in runs for shard in run.shards):
        return whole
    rows = {id(run): {step: t for t, step in enumerate(run.steps)} for run in runs}
    sources = [_sources(runs, name, i) for i, name in enumerate(first.names)]
    norms = [[_norm(one, step, rows) for one in sources] for step in first.steps]
    norm = [n if math.isfinite(n) else _total(row) for n, row in zip(first.norm, norms, strict=True)]
    sums = [_summed(runs, step, rows) for step in first.steps]
    return dataclasses.replace(
        whole,
        norms=norms,
        norm=norm,
        peak=[n if math.isnan(p) else p for n, p in zip(norm, first.peak, strict=True)],
        update=[math.sqrt(s[0] / s[1]) if s[1] > 0 else math.nan for s in sums],
        step_grad_cosine=[
            s[2] / math.sqrt(s[3]) / math.sqrt(s[4]) if s[3] > 0 and s[4] > 0 else math.nan for s in sums
        ],
        unmoved=[_unmoved(sources, step, rows) for step in first.steps],
    )


def _concerns_all(note: dict[str, object]) -> bool:
    return "anomaly" in note or "unmeasured" in note or "stopped" in note


def is_sharded(shard: list[int] | None) -> bool:
    """Return whether a rank holds one of several shards of a parameter, or none."""
    return shard is not None and shard[1] != 1


def _sources(runs: list[Run], name: str, i: int) -> _Sources | None:
    """Return where the shards of a parameter are, each once; None where one is missing."""
    if not is_sharded(runs[0].shards[i]):
        return [(runs[0], i)]
    parts: dict[int, tuple[Run, int]] = {}
    count = 0
    for run in runs:
        at = i if run.names[i : i + 1] == [name] else run.names.index(name) if name in run.names else None
        held = None if at is None else run.shards[at]
        if at is not None and held is not None and held[1]:
            parts.setdefault(held[0], (run, at))
            count = held[1]
    return list(parts.values()) if len(parts) == count > 0 else None


def _norm(sources: _Sources | None, step: int, rows: dict[int, dict[int, int]]) -> float | None:
    if sources is None or any(step not in rows[id(run)] for run, _ in sources):
        return math.nan
    parts = [run.norms[rows[id(run)][step]][i] for run, i in sources]
    return None if all(n is None for n in parts) else _total(parts)


def _total(norms: list[float | None]) -> float:
    # Not math.hypot of all: a NaN and an infinity make an infinity there, and a NaN may stand for the unknown.
    known = [n for n in norms if n is not None]
    return math.nan if any(math.isnan(n) for n in known) else math.hypot(*known)


def _summed(runs: list[Run], step: int, rows: dict[int, dict[int, int]]) -> list[float]:
    """Return the sums over all ranks; unknown where one of them has not recorded the step."""
    unknown = [math.nan] * 5
    if len(runs) < runs[0].header["world"] or any(step not in rows[id(run)] for run in runs):
        return unknown
    each = [run.partial_sums[rows[id(run)][step]] or unknown for run in runs]
    return [sum(column) for column in zip(*each, strict=True)]


def _unmoved(sources: list[_Sources | None], step: int, rows: dict[int, dict[int, int]]) -> set[int]:
    """Return the parameters of which no shard moved."""
    return {
        i
        for i, one in enumerate(sources)
        if one and all(step in rows[id(run)] and at in run.unmoved[rows[id(run)][step]] for run, at in one)
    }


def _nonfinite(runs: list[Run]) -> list[NonfiniteStep]:
    """Return the steps at which a gradient was not finite on any rank, with the values of each shard counted once."""
    parts: dict[int, tuple[NonfiniteStep, dict[tuple[str, int], int]]] = {}
    for run in runs:
        index = {name: shard[0] if shard else 0 for name, shard in zip(run.names, run.shards, strict=True)}
        for event in run.nonfinite:
            _, counts = parts.setdefault(event.step, (event, {}))
            for name, n in event.offenders.items():
                key = (name, index.get(name, 0))
                counts[key] = max(n, counts.get(key, 0))
    merged = []
    for _, (event, counts) in sorted(parts.items()):
        names = dict.fromkeys(name for name, _ in counts)
        offenders = {name: sum(n for (other, _), n in counts.items() if other == name) for name in names}
        merged.append(dataclasses.replace(event, offenders=offenders))
    return merged
