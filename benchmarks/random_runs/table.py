"""What reports say of random runs, against what would have helped: the table of a list, with intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from judge import HARMED, best_of_eight, end_of, interval, over_best, truth, truth_of_seed
from looks import final, short
from run import record_path, with_curves
from task import GROUP
from together import Way, train_together

from gradrein.watch import read_run
from gradrein.watch.analysis.signs import measure
from gradrein.watch.report.report import report_on


def reports(lines: list[dict[str, Any]], folder: Path) -> None:
    """Add to each run what its report says, the signs it was judged by, and what the first advice leads to."""
    for group in sorted({line["task"]["number"] // GROUP for line in lines}):
        tasks = [line for line in lines if line["task"]["number"] // GROUP == group]
        ways = []
        for i, line in enumerate(tasks):
            for seed in line["seeds"]:
                seed.update(_said(record_path(folder, line["task"], seed["seed"])))
                ways.append(_way(i, seed))
        torch.manual_seed(group)
        looks = torch.stack(train_together([line["task"] for line in tasks], ways).looks, 1).tolist()
        for (seed, way), column in zip(_pairs(tasks, ways), looks, strict=True):
            seed["advised end"] = seed["base"] if way == Way(way.task, way.seed) else final(column)


def _pairs(tasks: list[dict[str, Any]], ways: list[Way]) -> zip:
    return zip([seed for line in tasks for seed in line["seeds"]], ways, strict=True)


def _said(record: Path) -> dict[str, Any]:
    path = record.with_suffix(".read.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in with_curves(record)))
    run = read_run(path)
    path.unlink()
    report = report_on(run)
    first = report.advice.actions[0].try_with if report.advice.actions else ""
    return {
        "signs": {name: short(value) for name, value in measure(run).items()},
        "read": len(run.test) if run.test is not None else 0,
        "findings": [finding.name for finding in report.findings],
        "advised": first,
    }


def _way(task: int, seed: dict[str, Any]) -> Way:
    """Return the way that the options of `gradrein watch` lead to."""
    words = seed["advised"].split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    clip = given.get("--clip")
    return Way(task, seed["seed"], clip if clip in (None, "auto") else float(clip), float(given.get("--lr-scale", 1)))


def table(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a list whose runs have their reports."""
    runs = {kind: [s for line in lines if truth(line) == kind for s in line["seeds"]] for kind in ("help", "fine")}
    every = [seed for line in lines for seed in line["seeds"]]
    needy = [seed for seed in every if truth_of_seed(seed) == "help" and math.isfinite(best_of_eight(seed))]
    finite = [seed for seed in runs["help"] if seed["base"] is not None]
    harmed = [seed for seed in every if _advised_end(seed) > HARMED * end_of(seed, None)]
    return {
        "tasks": len(lines),
        "tasks that need help": sum(truth(line) == "help" for line in lines),
        "tasks that are fine": sum(truth(line) == "fine" for line in lines),
        "heard": _share([bool(s["findings"]) for s in runs["help"]]),
        "heard, of those that stay finite": _share([bool(s["findings"]) for s in finite]),
        "left alone": _share([not s["findings"] for s in runs["fine"]]),
        "harmed": _share([seed in harmed for seed in every]),
        "test loss read, of scripts that print it by name": _share([s["read"] > 0 for s in _printing(lines)]),
        "end over the best of eight, where help is needed": {
            "as it is": _mean(needy, lambda s: over_best(s, None)),
            "advised first": _mean(needy, lambda s: _ratio(_advised_end(s), s)),
            "auto": _mean(needy, lambda s: over_best(s, "auto")),
        },
        "area under the curve, finite runs": {name: _area(runs, name) for name in _names(every)},
    }


def _advised_end(seed: dict[str, Any]) -> float:
    return math.inf if seed["advised end"] is None else seed["advised end"]


def _ratio(end: float, seed: dict[str, Any]) -> float:
    return min(100.0, max(end, 1e-12) / max(best_of_eight(seed), 1e-12))


def _printing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    silent = (4, 6, 19, 23, 35, 36, 39)  # print statements without a name for it
    return [seed for line in lines if line["task"]["print"] not in silent for seed in line["seeds"]]


def _share(hits: list[bool]) -> dict[str, Any]:
    low, high = interval(sum(hits), len(hits))
    return {"hits": sum(hits), "of": len(hits), "from": round(low, 3), "to": round(high, 3)}


def _mean(seeds: list[dict[str, Any]], value: Any) -> dict[str, float]:
    """Return the geometric mean, with an interval of two standard errors of the logarithm."""
    logs = torch.tensor([math.log(value(seed)) for seed in seeds], dtype=torch.float64)
    if len(logs) < 2:
        return {"mean": math.nan, "runs": len(logs)}
    middle, error = logs.mean().item(), 1.96 * logs.std().item() / len(logs) ** 0.5
    found = {"mean": math.exp(middle), "from": math.exp(middle - error), "to": math.exp(middle + error)}
    return {**{k: round(v, 3) for k, v in found.items()}, "runs": len(logs)}


def _names(seeds: list[dict[str, Any]]) -> list[str]:
    return sorted({name for seed in seeds for name in seed["signs"]})


def _area(runs: dict[str, list[dict[str, Any]]], name: str) -> float:
    """Return how often a sign is larger in a run that needs help than in a fine one."""
    need, fine = ([s["signs"][name] for s in runs[k] if s["base"] is not None and name in s["signs"]] for k in runs)
    wins = sum((a > b) + 0.5 * (a == b) for a in need for b in fine)
    return round(wins / (len(need) * len(fine)), 3) if need and fine else math.nan


def page(tables: dict[str, dict[str, Any]]) -> str:
    """Return the tables as a page."""
    head = "# Random runs: what reports say, and what would have helped\n\n"
    intro = "Written by `python benchmarks/random_runs judge`; 95% intervals in brackets. Shares are of runs.\n\n"
    rows = ["| | " + " | ".join(tables) + " |", "|---|" + "---|" * len(tables)]
    first = next(iter(tables.values()))
    for name, value in first.items():
        if isinstance(value, dict) and "hits" not in value:
            rows += [
                f"| {name}: {k} | " + " | ".join(_cell(t[name].get(k)) for t in tables.values()) + " |" for k in value
            ]
        else:
            rows.append(_row(name, [t[name] for t in tables.values()]))
    return head + intro + "\n".join(rows) + "\n"


def _cell(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "hits" in value:
        return f"{value['hits']} of {value['of']} ({value['from']:.0%} to {value['to']:.0%})"
    return f"{value['mean']} ({value.get('from')} to {value.get('to')}, {value['runs']} runs)"


def _row(name: str, values: list[Any]) -> str:
    return f"| {name} | " + " | ".join(map(_cell, values)) + " |"
