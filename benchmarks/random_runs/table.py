"""What reports say of random runs, against what would have helped: the table of a list, with intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from calibrate import Advised, is_harmed, ratio, tried
from judge import NEEDS, best_of_eight, end_of, helps_by, interval, truth, truth_of_seed
from looks import final, short
from printing import NO_TEST_LOSS, UNNAMED
from run import WAYS, record_path, with_curves, write_record
from task import GROUP
from together import Way, train_together

from gradrein.watch import Run, read_run
from gradrein.watch.analysis.advice import LOST, TRY, leaf_of
from gradrein.watch.analysis.signs import measure, score_of
from gradrein.watch.report.report import report_on

CLOSE = 1.1  # of the best is as good as the best


def add_signs(lines: list[dict[str, Any]], folder: Path) -> None:
    """Add to each run the signs it is judged by."""
    for line in lines:
        for seed in line["seeds"]:
            run = _read(record_path(folder, line["task"], seed["seed"]))
            seed["signs"] = {name: short(value) for name, value in measure(run).items()}


def signs_after(runs: list[Advised], folder: Path) -> list[tuple[Any, Any, dict[str, float], float]]:
    """Return the signs and the end of runs that are changed in these ways."""
    found = []
    for group in sorted({line["task"]["number"] // GROUP for line, _, _ in runs}):
        inside = [run for run in runs if run[0]["task"]["number"] // GROUP == group]
        ways = []
        for i, (_, seed, name) in enumerate(inside):
            clip, scale = WAYS[name]
            ways.append(Way(i, seed["seed"], clip * seed["norm"] if isinstance(clip, float) else clip, scale))
        torch.manual_seed(group)
        traces = train_together([line["task"] for line, _, _ in inside], ways, traced=True)
        ends = torch.stack(traces.looks, 1).tolist()
        for row, (line, seed, _) in enumerate(inside):
            if (end := final(ends[row])) is not None:
                write_record(line["task"], ways[row], traces, row, folder / "after.jsonl")
                found.append((line, seed, measure(_read(folder / "after.jsonl")), end))
    return found


def reports(lines: list[dict[str, Any]], folder: Path) -> None:
    """Add to each run what its report says, what the first advice leads to, and what the report of that says."""
    for group in sorted({line["task"]["number"] // GROUP for line in lines}):
        tasks = [line for line in lines if line["task"]["number"] // GROUP == group]
        ways = []
        for i, line in enumerate(tasks):
            for seed in line["seeds"]:
                seed.update(_said(_read(record_path(folder, line["task"], seed["seed"]))))
                ways.append(_way(i, seed))
        torch.manual_seed(group)
        traces = train_together([line["task"] for line in tasks], ways, traced=True)
        looks = torch.stack(traces.looks, 1).tolist()
        seeds = [seed for line in tasks for seed in line["seeds"]]
        for row, (seed, way) in enumerate(zip(seeds, ways, strict=True)):
            if way == Way(way.task, way.seed):
                seed["advised end"] = seed["base"]
                continue
            path = folder / "after.jsonl"
            write_record(tasks[way.task]["task"], way, traces, row, path)
            seed["advised end"] = final(looks[row])
            seed["findings after"] = [finding.name for finding in report_on(_read(path)).findings]


def _read(record: Path) -> Run:
    path = record.with_suffix(".read.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in with_curves(record)))
    run = read_run(path)
    path.unlink()
    return run


def _said(run: Run) -> dict[str, Any]:
    report = report_on(run)
    names = [finding.name for finding in report.findings]
    changes = leaf_of(run, not set(names).isdisjoint(LOST))[1]
    return {
        "signs": {name: short(value) for name, value in measure(run).items()},
        "score": short(max(-99.0, score_of(run))),
        "read": len(run.test) if run.test is not None else 0,
        "findings": names,
        "advised": report.advice.actions[0].try_with if report.advice.actions else "",
        "tried": [way for way, *_ in changes if way != "try"] if report.advice.actions else [],
    }


def _way(task: int, seed: dict[str, Any]) -> Way:
    """Return the way that the options of `gradrein watch` lead to: that of the run as it is where they measure."""
    words = seed["advised"].removeprefix(TRY).split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    clip = given.get("--clip")
    return Way(task, seed["seed"], clip if clip in (None, "auto") else float(clip), float(given.get("--lr-scale", 1)))


def table(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a list whose runs have their reports."""
    runs = {kind: [s for line in lines if truth(line) == kind for s in line["seeds"]] for kind in ("help", "fine")}
    every = [seed for line in lines for seed in line["seeds"]]
    needy = [seed for seed in every if truth_of_seed(seed) == "help" and math.isfinite(best_of_eight(seed))]
    advised = [seed for seed in every if seed["advised"]]
    told = [seed for seed in needy if seed["advised"]]
    finite = [seed for seed in runs["help"] if seed["base"] is not None]
    after = [seed for seed in every if "findings after" in seed]
    still = [seed for seed in after if seed["findings after"]]
    return {
        "tasks": len(lines),
        "tasks that need help": sum(truth(line) == "help" for line in lines),
        "tasks that are fine": sum(truth(line) == "fine" for line in lines),
        "heard": _share([bool(s["findings"]) for s in runs["help"]]),
        "heard, of those that stay finite": _share([bool(s["findings"]) for s in finite]),
        "left alone": _share([not s["findings"] for s in runs["fine"]]),
        "harmed": _share([is_harmed(seed, _advised_end(seed)) for seed in every]),
        "helped, of runs in need that are advised a change": _share(
            [_is_helped(s) for s in told if s["advised"] != TRY]
        ),
        "advised to measure with `--try` first, of runs that are advised": _share(
            [s["advised"] == TRY for s in advised]
        ),
        "`--try` picks within 1.1 of the best": _share([ratio(s, _tried(s)) <= CLOSE for s in told]),
        "no finding after the advised change": _share([not seed["findings after"] for seed in after]),
        "a finding after it, and another change would have ended a third lower": _share([_more(s) for s in still]),
        "test loss read, of scripts that print it by name": _share([s["read"] > 0 for s in _printing(lines)]),
        "end over the best, where help is needed": {
            "as it is": _mean(needy, _as_it_is),
            "advised first": _mean(needy, lambda s: ratio(s, _advised_end(s))),
            "`auto`": _mean(needy, lambda s: ratio(s, end_of(s, "auto"))),
            "advised first, and what `--try` keeps where that is advised": _mean(needy, _followed),
            "`--try`, or as it is where nothing is said": _mean(needy, lambda s: ratio(s, _tried(s))),
            "advised first, below the best counted as such": _mean(needy, _below),
        },
        "missed": _missed([seed for seed in runs["help"] if not seed["findings"]]),
        "heard against left alone, by the limit of the rule": _curve(runs),
        "area under the curve, finite runs": {
            "sum of the signs": _area(runs, lambda s: s["score"]),
            **{name: _area(runs, lambda s, name=name: s["signs"].get(name)) for name in _names(every)},
        },
    }


def _advised_end(seed: dict[str, Any]) -> float:
    return math.inf if seed["advised end"] is None else seed["advised end"]


def _as_it_is(seed: dict[str, Any]) -> float:
    return ratio(seed, end_of(seed, None)) if seed["base"] is not None else 100.0


def _followed(seed: dict[str, Any]) -> float:
    return ratio(seed, _tried(seed) if seed["advised"] == TRY else _advised_end(seed))


def _below(seed: dict[str, Any]) -> float:
    """Return the advised end over the best of eight, also where it is below it."""
    return min(100.0, max(_advised_end(seed), 1e-12) / max(best_of_eight(seed), 1e-12))


def _tried(seed: dict[str, Any]) -> float:
    return tried(seed, [way for way in seed["tried"] if way in WAYS])


def _is_helped(seed: dict[str, Any]) -> bool:
    return helps_by(seed, _advised_end(seed))


def _more(seed: dict[str, Any]) -> bool:
    """Return whether another change would have ended below two thirds of what the advised one ended with."""
    return min(end_of(seed, way) for way in seed["ways"]) < NEEDS * _advised_end(seed)


def _printing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    silent = (*NO_TEST_LOSS, *UNNAMED)
    return [seed for line in lines if line["task"]["print"] not in silent for seed in line["seeds"]]


def _share(hits: list[bool]) -> dict[str, Any]:
    low, high = interval(sum(hits) / 2, len(hits) / 2)  # as if the two runs of a task were one
    return {"hits": sum(hits), "of": len(hits), "from": round(low, 3), "to": round(high, 3)}


def _mean(seeds: list[dict[str, Any]], value: Any) -> dict[str, float]:
    """Return the geometric mean, with an interval of two standard errors of its logarithm, as of half as many runs."""
    logs = torch.tensor([math.log(value(seed)) for seed in seeds], dtype=torch.float64)
    if len(logs) < 2:
        return {"mean": math.nan, "runs": len(logs)}
    middle, error = logs.mean().item(), 1.96 * logs.std().item() / (len(logs) / 2) ** 0.5
    found = {"mean": math.exp(middle), "from": math.exp(middle - error), "to": math.exp(middle + error)}
    return {**{k: round(v, 3) for k, v in found.items()}, "runs": len(logs)}


def _names(seeds: list[dict[str, Any]]) -> list[str]:
    return sorted({name for seed in seeds for name in seed["signs"]})


def _finite(runs: dict[str, list[dict[str, Any]]], value: Any) -> list[list[float]]:
    return [[v for s in runs[k] if s["base"] is not None and (v := value(s)) is not None] for k in ("help", "fine")]


def _curve(runs: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return how many are heard where so much is left alone, of those that stay finite and of all."""
    need, fine = _finite(runs, lambda s: s["score"])
    lost, found = sum(s["base"] is None for s in runs["help"]), {}
    for share in (0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.99):
        limit = sorted(fine)[min(len(fine) - 1, int(share * len(fine)))] if fine else math.inf
        heard, of = sum(v > limit for v in need), len(need)
        all_heard = (heard + lost) / max(1, of + lost)
        found[f"{100 * share:g}% left alone"] = f"{heard} of {of} finite, {all_heard:.0%} of all"
    return found


def _missed(missed: list[dict[str, Any]]) -> dict[str, str]:
    """Return what the records of runs that need help, and are not spoken of, do not show."""
    end = "test loss, end over lowest"
    without = [seed for seed in missed if end not in seed["signs"]]
    near = [seed for seed in missed if end in seed["signs"] and seed["signs"][end] < math.log(CLOSE)]
    return {
        "in all": str(len(missed)),
        "without a test loss": str(len(without)),
        "with one that ends within a tenth of its lowest": str(len(near)),
        "others": str(len(missed) - len(without) - len(near)),
    }


def _area(runs: dict[str, list[dict[str, Any]]], value: Any) -> float:
    """Return how often a number is larger in a run that needs help than in a fine one."""
    need, fine = _finite(runs, value)
    wins = sum((a > b) + 0.5 * (a == b) for a in need for b in fine)
    return round(wins / (len(need) * len(fine)), 3) if need and fine else math.nan


def page(tables: dict[str, dict[str, Any]]) -> str:
    """Return the tables as a page."""
    head = "# Random runs: what reports say, and what would have helped\n\n"
    intro = (
        "Written by `python benchmarks/random_runs judge`; 95% intervals in brackets. Shares are of runs, two of each "
        "task, and intervals as if these were one. Constants are fitted to *build*, *held*, *wide* and *unseen*; "
        "*last* was judged once, after that. Each of its tasks has a form of its own; those of the others come in "
        "groups of ten alike, so that their intervals are too narrow. The best is the best of eight alternatives; an "
        "end below it counts as 1, except in the row that says otherwise.\n\n"
    )
    rows = ["| | " + " | ".join(tables) + " |", "|---|" + "---|" * len(tables)]
    first = next(iter(tables.values()))
    for name, value in first.items():
        if isinstance(value, dict) and "hits" not in value:
            rows += [
                f"| {name}: {k} | " + " | ".join(_cell(t[name].get(k)) for t in tables.values()) + " |" for k in value
            ]
        else:
            rows.append(f"| {name} | " + " | ".join(_cell(t[name]) for t in tables.values()) + " |")
    return head + intro + "\n".join(rows) + "\n"


def _cell(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    if "hits" in value:
        return f"{value['hits']} of {value['of']} ({value['from']:.0%} to {value['to']:.0%})"
    return f"{value['mean']} ({value.get('from')} to {value.get('to')}, {value['runs']} runs)"
