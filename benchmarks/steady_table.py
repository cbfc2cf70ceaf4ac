"""The runs of `steady.py` in numbers and tables."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

LENGTHS = ("1x", "4x")
COUNTS = ("swing", "seen", "watched")
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
                "worst": max(r["final"] / b["final"] for r, b in own),
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


def keep(found: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Take from an earlier summary what has more seeds there: the ways of a task, what was seen of it, alarms.

    Seeds of two summaries are not added up: they may be the same ones. What is taken is marked.
    """
    for which, lengths in earlier.get("lists", {}).items():
        for length, rows in lengths.items():
            now = found["lists"].setdefault(which, {}).setdefault(length, {})
            for name, old in rows.items():
                row = now.setdefault(name, {"ways": {}, **seen([], length)})
                if old["watched"] > row["watched"]:
                    row.update({key: old[key] for key in COUNTS}, earlier_counts=True)
                if old.get("seeds", 0) > row.get("seeds", 0):
                    counts = {key: row[key] for key in COUNTS}
                    was = row.get("earlier_counts", False)
                    now[name] = {**old, **counts, "earlier": True, "earlier_counts": was}
    for which in ("healthy", "healthy_unseen"):
        for name, row in earlier.get(which, {}).items():
            now = found.setdefault(which, {})
            if name not in now or row["1x"]["runs"] > now[name]["1x"]["runs"]:
                now[name] = {**row, "earlier": True}
    return found


def tables(found: dict[str, Any]) -> str:
    """Return all of it in Markdown."""
    parts = []
    for which, title in (
        ("seen", "Tasks that `auto` and the advice were built on"),
        ("unseen", "Tasks that `auto` was not built on; the advice was"),
        ("third", "Tasks that neither was built on"),
    ):
        lists = found["lists"][which]
        swinging = {name for rows in lists.values() for name, row in rows.items() if row["swing"]}
        for length in LENGTHS:
            rows = lists[length]
            if any(row["ways"] for row in rows.values()):
                extent = _extent(rows, swinging)
                parts.append(f"### {title}, length {length}\n\n{extent}\n\n{_table(rows, swinging)}")
    for which, title in (("healthy", "built on"), ("healthy_unseen", "not built on")):
        if found.get(which):
            parts.append(f"### Healthy runs with a finding, {title}\n\n" + _healthy(found[which]))
    return "\n".join(parts)


def _extent(rows: dict[str, dict[str, Any]], swinging: set[str]) -> str:
    """Say how much was run: a table of a few seeds and thresholds is a first look."""
    seeds = sorted({row.get("seeds", 0) for row in rows.values()})
    of = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' if seeds[0] != 1 else ''}"
    thresholds = min((row["thresholds"] for row in rows.values() if "thresholds" in row), default=0)
    more = " Rows with * were not run again: they are of an earlier state." if any(map(_star, rows.values())) else ""
    if any(_star(row, "earlier_counts") for row in rows.values()):
        more += " Counts of swinging runs with * are of an earlier state."
    calm = sorted(f"`{name}`" for name, row in rows.items() if name not in swinging and row["watched"])
    still = f" Tasks that did not swing at either length: {', '.join(calm)}." if calm else ""
    return f"Of each task {of} with {thresholds} fixed thresholds; a cell with fewer says so in brackets.{still}{more}"


def _star(row: dict[str, Any], what: str = "earlier") -> str:
    return "*" if row.get(what) else ""


def _table(rows: dict[str, dict[str, Any]], swinging: set[str]) -> str:
    ways = list(dict.fromkeys(way for row in rows.values() for way in row["ways"]))
    head = "| task | seeds | best threshold | swing, seen, of | "
    lines = [head + " | ".join(ways) + " |", "|---" * (len(ways) + 4) + "|"]
    for name, row in rows.items():
        cells = [_cell(row["ways"].get(way), row.get("seeds", 0)) for way in ways]
        counts = ", ".join(str(row[key]) for key in COUNTS) + _star(row, "earlier_counts")
        seen_here = counts if row["watched"] else ""
        first = f"{name}{_star(row)} | {row.get('seeds', 0)} | {row.get('best_fixed', '')}"
        lines.append(f"| {first} | {seen_here} | " + " | ".join(cells) + " |")
    counted = [sum(row[key] for row in rows.values()) for key in COUNTS]
    run = {name: row for name, row in rows.items() if row["ways"]}
    picked = [row for name, row in run.items() if name in swinging]
    if picked and len(picked) < len(run):
        lines += _means(picked, ways, f"{len(picked)} that swing", "")
    lines += _means([*run.values()], ways, f"all {len(run)}", ", ".join(map(str, counted)))
    return "\n".join(lines) + "\n"


def _means(rows: list[dict[str, Any]], ways: list[str], of: str, counted: str) -> list[str]:
    """Return the lines over tasks: mean, median and worst of the final loss, and of single runs the worst."""
    cells = [[row["ways"][way] for row in rows if way in row["ways"]] for way in ways]
    finals = [[cell["final"] for cell in found] for found in cells]
    lines = {
        "mean of final": [f"{geometric(one):.2f}" if one else "" for one in finals],  # a way may have none of these
        "median of final": [f"{statistics.median(one):.2f}" if one else "" for one in finals],
        "worst of final": [f"{max(one):.2f}" if one else "" for one in finals],
        "worst single run": [_largest(found, "worst", ".2f") for found in cells],
        "final over lowest, worst run": [_largest(found, "final_over_lowest", ".1f") for found in cells],
    }
    return [
        f"| **{name}, {of}** | | | {counted if name == 'mean of final' else ''} | {' | '.join(values)} |"
        for name, values in lines.items()
        if any(values)
    ]


def _largest(cells: list[dict[str, float]], key: str, form: str) -> str:
    """Return the largest of a number; nothing where there is none, or an earlier summary lacks it."""
    return format(max(cell[key] for cell in cells), form) if cells and all(key in cell for cell in cells) else ""


def _cell(way: dict[str, float] | None, seeds: int) -> str:
    if way is None:
        return ""
    fewer = f" ({way['seeds']})" if way["seeds"] < seeds else ""
    return f"{way['final']:.2f}, {way['best']:.2f}, {way['swing']:.2f}{fewer}"


def _healthy(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | 1x | 4x | findings |", "|---|---|---|---|"]
    for name, row in rows.items():
        counts = " | ".join(f"{row[length]['alarms']} of {row[length]['runs']}" for length in LENGTHS)
        names = sorted({n for length in LENGTHS for n in row[length]["findings"]})
        lines.append(f"| {name}{_star(row)} | {counts} | {', '.join(names)} |")
    totals = [tuple(sum(row[length][key] for row in rows.values()) for key in ("alarms", "runs")) for length in LENGTHS]
    lines.append("| **all** | " + " | ".join(f"{alarms_} of {runs}" for alarms_, runs in totals) + " | |")
    kept = (
        ["", "Rows with * were not run again: they are of an earlier state."] if any(map(_star, rows.values())) else []
    )
    return "\n".join(lines + kept) + "\n"
