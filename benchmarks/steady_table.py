"""The runs of `steady.py` in numbers and tables."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

LENGTHS = ("1x", "4x")
TRIED = ("none", "advised", "auto", "lr/3")
NOT_AN_ALARM = {"overfits": {"overfitting"}}  # what a healthy run of that name really shows


def geometric(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(v, 1e-300)) for v in values))


def summary(runs: list[dict[str, Any]], compared: Sequence[str], fixed: Sequence[str]) -> dict[str, Any]:
    """Return for each list, length and task what every way did, and what was found."""
    by: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run in runs:
        by[run["list"]][run["task"]][run["way"]].append(run)
    for tasks in by.values():
        for ways in tasks.values():
            ways["tried"] = tried(ways)
    found: dict[str, Any] = {"lists": {}}
    for which in ("seen", "unseen", "third"):
        tasks = by.get(which, {})
        found["lists"][which] = {
            length: {name: task(ways, length, compared, fixed) for name, ways in tasks.items()} for length in LENGTHS
        }
    for which in ("healthy", "healthy_unseen"):
        rows = by.get(which, {}).items()
        found[which] = {
            name: {length: alarms(name, ways["watched"], length) for length in LENGTHS} for name, ways in rows
        }
    return found


def tried(ways: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each seed the run that ended lowest at 1x, where all that `--try` compares were made."""
    by_seed: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for way in TRIED:
        for run in ways.get(way, []):
            by_seed[run["seed"]].append(run)
    return [min(found, key=lambda r: r["1x"]["final"]) for found in by_seed.values() if len(found) == len(TRIED)]


def task(
    ways: dict[str, list[dict[str, Any]]], length: str, compared: Sequence[str], fixed: Sequence[str]
) -> dict[str, Any]:
    """Return one row: the best fixed threshold, what it reached, and every way over that."""
    row: dict[str, Any] = {"ways": {}, **seen(ways.get("watched", []), length)}
    whole = set.intersection(*({r["seed"] for r in ways.get(way, [])} for way in fixed))  # seeds all thresholds have
    ways = {way: [r for r in runs if r["seed"] in whole] for way, runs in ways.items()}
    finals = {way: geometric(r[length]["final"] for r in ways[way]) for way in fixed if ways.get(way)}
    if not finals:
        return row
    row["best_fixed"] = min(finals, key=lambda way: finals[way])
    best = {r["seed"]: r[length] for r in ways[row["best_fixed"]]}
    row["thresholds"], row["seeds"] = len(finals), len(whole)
    row["final_of_best_fixed"] = finals[row["best_fixed"]]
    for way in compared:
        own = [(r[length], best[r["seed"]]) for r in ways.get(way, [])]  # each beside the best threshold of its seed
        if own:
            row["ways"][way] = {
                "final": geometric(r["final"] / b["final"] for r, b in own),
                "best": geometric(r["best"] / b["best"] for r, b in own),
                "swing": statistics.fmean(r["swing"] for r, _ in own),
                "final_over_lowest": max(r["final"] / r["settled"] for r, _ in own),
                "seeds": len(own),
            }
    return row


def seen(watched: list[dict[str, Any]], length: str) -> dict[str, int]:
    """Return how many runs without clipping swing, and how many of those have a finding."""
    swinging = [r[length] for r in watched if r[length]["swings"]]
    return {"swing": len(swinging), "seen": sum(bool(r["findings"]) for r in swinging), "watched": len(watched)}


def alarms(name: str, watched: list[dict[str, Any]], length: str) -> dict[str, Any]:
    """Return how many healthy runs have a finding, and which."""
    found = [set(r[length]["findings"]) - NOT_AN_ALARM.get(name, set()) for r in watched]
    return {"runs": len(found), "alarms": sum(map(bool, found)), "findings": sorted(set().union(*found))}


def tables(found: dict[str, Any]) -> str:
    """Return all of it in Markdown."""
    parts = []
    for which, title in (
        ("seen", "Tasks that `auto` and the advice were built on"),
        ("unseen", "Tasks that `auto` was not built on; the advice was"),
        ("third", "Tasks that neither was built on, run once at the end"),
    ):
        for length in LENGTHS:
            rows = found["lists"][which][length]
            if any(row["ways"] for row in rows.values()):
                parts.append(f"### {title}, length {length}\n\n{_extent(rows)}\n\n{_table(rows)}")
    for which, title in (("healthy", "built on"), ("healthy_unseen", "not built on, run once at the end")):
        if found.get(which):
            parts.append(f"### Healthy runs with a finding, {title}\n\n" + _healthy(found[which]))
    return "\n".join(parts)


def _extent(rows: dict[str, dict[str, Any]]) -> str:
    """Say how much was run: a table of a few seeds and thresholds is a first look."""
    seeds, thresholds = (min(row.get(key, 0) for row in rows.values()) for key in ("seeds", "thresholds"))
    return f"At least {seeds} seed{'s' if seeds != 1 else ''} and {thresholds} fixed thresholds for each task."


def _table(rows: dict[str, dict[str, Any]]) -> str:
    ways = list(dict.fromkeys(way for row in rows.values() for way in row["ways"]))
    lines = ["| task | best threshold | swing, seen | " + " | ".join(ways) + " |", "|---" * (len(ways) + 3) + "|"]
    for name, row in rows.items():
        cells = [_cell(row["ways"].get(way)) for way in ways]
        seen_here = f"{row['seen']} of {row['swing']}" if row["watched"] else ""
        lines.append(f"| {name} | {row.get('best_fixed', '')} | {seen_here} | " + " | ".join(cells) + " |")
    finals = {way: [row["ways"][way]["final"] for row in rows.values() if way in row["ways"]] for way in ways}
    swing, seen_all = (sum(row[key] for row in rows.values()) for key in ("swing", "seen"))
    means = " | ".join(f"{geometric(values):.2f}" for values in finals.values())
    worst = " | ".join(f"{max(values):.2f}" for values in finals.values())
    held = " | ".join(
        f"{max(row['ways'][way]['final_over_lowest'] for row in rows.values() if way in row['ways']):.1f}"
        for way in ways
    )
    found = f"{seen_all} of {swing}" if swing else ""
    lines += [f"| **mean of final** | | {found} | {means} |", f"| **worst of final** | | | {worst} |"]
    lines.append(f"| **final over lowest, worst run** | | | {held} |")
    return "\n".join(lines) + "\n"


def _cell(way: dict[str, float] | None) -> str:
    return "" if way is None else f"{way['final']:.2f}, {way['best']:.2f}, {way['swing']:.2f}"


def _healthy(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | 1x | 4x | findings |", "|---|---|---|---|"]
    for name, row in rows.items():
        counts = " | ".join(f"{row[length]['alarms']} of {row[length]['runs']}" for length in LENGTHS)
        names = sorted({n for length in LENGTHS for n in row[length]["findings"]})
        lines.append(f"| {name} | {counts} | {', '.join(names)} |")
    totals = [tuple(sum(row[length][key] for row in rows.values()) for key in ("alarms", "runs")) for length in LENGTHS]
    lines.append("| **all** | " + " | ".join(f"{alarms_} of {runs}" for alarms_, runs in totals) + " | |")
    return "\n".join(lines) + "\n"
