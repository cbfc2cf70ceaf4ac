"""The runs of several ranks as one.

What ranks hold copies of is taken from the lowest. What they hold pieces of is put together from all of them, each
piece once; where one is missing the whole is not known, and NaN stands for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ._run import Event, Run

__all__ = ["common_steps", "is_cut", "merged"]

_Sources: TypeAlias = list[tuple["Run", int]]  # whose column to read: a run, and the place of the parameter in it


def common_steps(runs: Sequence[Run]) -> list[tuple[int, list[int]]]:
    """The steps that all of these runs recorded, each with its place in every one of them."""
    rows = [{step: t for t, step in enumerate(run.steps)} for run in runs]
    return [(step, [row[step] for row in rows]) for step in rows[0] if all(step in row for row in rows)] if rows else []


def merged(runs: list[Run]) -> Run:
    """One run of those of several ranks, in the order of their ranks."""
    first = runs[0]
    notes = [*first.notes, *({**n, "rank": run.rank} for run in runs[1:] for n in run.notes if _concerns_all(n))]
    whole = dataclasses.replace(first, ranks=tuple(runs), notes=notes, events=_events(runs))
    if not any(is_cut(piece) for run in runs for piece in run.pieces):
        return whole
    rows = {id(run): {step: t for t, step in enumerate(run.steps)} for run in runs}
    sources = [_sources(runs, name, i) for i, name in enumerate(first.names)]
    norms = [[_norm(one, step, rows) for one in sources] for step in first.steps]
    norm = [n if math.isfinite(n) else _together(row) for n, row in zip(first.norm, norms, strict=True)]
    sums = [_sums(runs, step, rows) for step in first.steps]
    return dataclasses.replace(
        whole,
        norms=norms,
        norm=norm,
        peak=[n if math.isnan(p) else p for n, p in zip(norm, first.peak, strict=True)],
        update=[math.sqrt(s[0] / s[1]) if s[1] > 0 else math.nan for s in sums],
        turn=[s[2] / math.sqrt(s[3]) / math.sqrt(s[4]) if s[3] > 0 and s[4] > 0 else math.nan for s in sums],
        unmoved=[_unmoved(sources, step, rows) for step in first.steps],
    )


def _concerns_all(note: dict[str, object]) -> bool:
    return "anomaly" in note or "unmeasured" in note or "stopped" in note


def is_cut(piece: list[int] | None) -> bool:
    """Is it one of several pieces of a parameter, or none?"""
    return piece is not None and piece[1] != 1


def _sources(runs: list[Run], name: str, i: int) -> _Sources | None:
    """Where the pieces of a parameter are, each once; None where one is missing."""
    piece = runs[0].pieces[i]
    if not is_cut(piece):
        return [(runs[0], i)]
    found: dict[int, tuple[Run, int]] = {}
    count = 0
    for run in runs:
        at = i if run.names[i : i + 1] == [name] else run.names.index(name) if name in run.names else None
        held = None if at is None else run.pieces[at]
        if at is not None and held is not None and held[1]:
            found.setdefault(held[0], (run, at))
            count = held[1]
    return list(found.values()) if len(found) == count > 0 else None


def _norm(sources: _Sources | None, step: int, rows: dict[int, dict[int, int]]) -> float | None:
    if sources is None or any(step not in rows[id(run)] for run, _ in sources):
        return math.nan
    found = [run.norms[rows[id(run)][step]][i] for run, i in sources]
    return None if all(n is None for n in found) else _together(found)


def _together(norms: list[float | None]) -> float:
    # Not math.hypot of all: of a NaN and an infinity that makes an infinity, and a NaN may stand for the unknown.
    known = [n for n in norms if n is not None]
    return math.nan if any(math.isnan(n) for n in known) else math.hypot(*known)


def _sums(runs: list[Run], step: int, rows: dict[int, dict[int, int]]) -> list[float]:
    """The sums over all ranks; unknown where one of them has not recorded the step."""
    unknown = [math.nan] * 5
    if len(runs) < runs[0].header["world"] or any(step not in rows[id(run)] for run in runs):
        return unknown
    each = [run.sums[rows[id(run)][step]] or unknown for run in runs]
    return [sum(column) for column in zip(*each, strict=True)]


def _unmoved(sources: list[_Sources | None], step: int, rows: dict[int, dict[int, int]]) -> set[int]:
    """Parameters of which no piece moved."""
    return {
        i
        for i, one in enumerate(sources)
        if one and all(step in rows[id(run)] and at in run.unmoved[rows[id(run)][step]] for run, at in one)
    }


def _events(runs: list[Run]) -> list[Event]:
    """Steps at which a gradient was not finite on any rank, with the values of each piece counted once."""
    found: dict[int, tuple[Event, dict[tuple[str, int], int]]] = {}
    for run in runs:
        index = {name: piece[0] if piece else 0 for name, piece in zip(run.names, run.pieces, strict=True)}
        for event in run.events:
            _, counts = found.setdefault(event.step, (event, {}))
            for name, n in event.offenders.items():
                key = (name, index.get(name, 0))
                counts[key] = max(n, counts.get(key, 0))
    merged_events = []
    for _, (event, counts) in sorted(found.items()):
        names = dict.fromkeys(name for name, _ in counts)
        offenders = {name: sum(n for (other, _), n in counts.items() if other == name) for name in names}
        merged_events.append(dataclasses.replace(event, offenders=offenders))
    return merged_events
