"""Ways to clip, on tasks that swing: `auto`, policies of papers, a lower learning rate, and eight fixed thresholds.

    python benchmarks/steady.py                          all that is missing, then the tables
    python benchmarks/steady.py --ways auto none --seeds 3
    python benchmarks/steady.py --table                  the tables of what was run so far

Twenty-one tasks that were written down before anything was run on them (`steady_tasks.py`, `steady_tasks_more.py`);
`auto` was developed on others. What `gradrein watch` finds and advises is judged by `random_runs`.

A run is of length 4x; what it was at 1x is its first quarter. The test loss is looked at forty times per length; one
that is not finite, or above ten times that at the start, counts as ten times that at the start.
- final, best: the mean of the last three test losses, and the lowest, over those of the fixed threshold that ended
  lowest, chosen from eight by looking at these very runs; geometric means over the seeds;
- swing: the mean of log10(test loss / lowest so far); 0 for a curve that only falls;
- swings: without clipping the test loss turns and rises by more than a fifth at least twice after the first quarter, or
  ends above twice its lowest. A task swings if a run of it does, at either length; means are over those tasks.

Every run is a line in `results/steady-runs.jsonl` (not kept in the repository) as soon as it is done, and is not run
again: stop and start as you like. Every process has one thread. Nothing here is a timing. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections import defaultdict
from collections.abc import Iterable
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import gradrein
from steady_task import Task
from steady_tasks import TASKS
from steady_tasks_more import MORE_TASKS

RESULTS = Path(__file__).parent / "results"
ALL_TASKS = TASKS | MORE_TASKS
LENGTHS = (1, 4)
LOOKS = 40
FIXED = {f"by_norm({limit:g})": gradrein.by_norm(limit) for limit in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)}
COMPARED = ("none", "auto", "ZClip", "AutoClip", "AdaGC", "lr/3")
POLICIES = {"ZClip": "zscore", "AutoClip": "quantile", "AdaGC": "running_norm", "auto": "auto", **FIXED}
Job = tuple[str, str, int]


def run(job: Job) -> dict[str, Any]:
    """Run one job (task, way, seed) and return what became of the test loss at each length."""
    name, way, seed = job
    torch.set_num_threads(1)
    task = ALL_TASKS[name](seed, 1 / 3) if way == "lr/3" else ALL_TASKS[name](seed)
    for optimizer, _ in task.turns if way in POLICIES else ():
        gradrein.Clipper(optimizer, POLICIES[way], nonfinite="skip")
    curve = _curve(task)
    lengths = {f"{length}x": judge(curve[: length * LOOKS + 1]) for length in LENGTHS}
    return {"task": name, "way": way, "seed": seed, **lengths}


def _curve(task: Task) -> list[float]:
    """Train, and return the test loss at the start and at every look; at most ten times that at the start."""
    curve = [task.measure()]
    for step in range(1, LENGTHS[-1] * task.steps + 1):
        task.step()
        if step * LOOKS // task.steps > (step - 1) * LOOKS // task.steps:
            loss = task.measure()
            curve.append(min(loss, 10 * curve[0]) if math.isfinite(loss) else 10 * curve[0])
    return curve


def judge(curve: list[float]) -> dict[str, Any]:
    """Return the final loss (mean of the last three), the lowest, the swing, and whether it swings."""
    assert min(curve) >= 0, "ratios are of losses that are not negative"
    curve = [max(loss, 1e-300) for loss in curve]  # zero has no ratio to anything
    lowest, above = curve[0], []
    for loss in curve[1:]:
        lowest = min(lowest, loss)
        above.append(math.log10(loss / lowest))
    final = fmean(curve[-3:])
    swings = _rises(curve[len(curve) // 4 :]) >= 2 or final > 2 * lowest
    return {"final": final, "best": lowest, "swing": fmean(above), "swings": swings}


def _rises(curve: list[float]) -> int:
    """Return how often a curve turns and rises by more than a fifth."""
    count, low, high, rising = 0, curve[0], curve[0], False
    for loss in curve[1:]:
        if not rising and loss > 1.2 * low:
            count, rising, high = count + 1, True, loss
        elif rising and loss < high / 1.2:
            rising, low = False, loss
        low, high = min(low, loss), max(high, loss)
    return count


def geometric(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(max(v, 1e-300)) for v in values))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each length and task what every way did; of seeds that have all thresholds."""
    by: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for one in runs:
        by[one["task"]][one["way"]][one["seed"]] = one
    whole = {name: set.intersection(*(set(ways[way]) for way in FIXED)) for name, ways in by.items()}
    return {
        f"{length}x": {name: _task(ways, f"{length}x", whole[name]) for name, ways in by.items() if whole[name]}
        for length in LENGTHS
    }


def _task(ways: dict[str, dict[int, dict[str, Any]]], length: str, seeds: set[int]) -> dict[str, Any]:
    """Return one row: the best fixed threshold, what it reached, and every way over that."""
    finals = {way: geometric(ways[way][seed][length]["final"] for seed in seeds) for way in FIXED}
    chosen = min(finals, key=lambda way: finals[way])
    row: dict[str, Any] = {"best_fixed": chosen, "final_of_best_fixed": finals[chosen], "seeds": len(seeds), "ways": {}}
    row["swings"] = any(one[each]["swings"] for one in ways["none"].values() for each in ("1x", "4x"))
    for way in COMPARED:
        # Each beside the best threshold of its seed
        own = [(one[length], ways[chosen][seed][length]) for seed, one in ways[way].items() if seed in seeds]
        if own:
            row["ways"][way] = {
                "final": geometric(one["final"] / best["final"] for one, best in own),
                "best": geometric(one["best"] / best["best"] for one, best in own),
                "swing": fmean(one["swing"] for one, _ in own),
            }
    return row


def mean_and_worst(rows: dict[str, dict[str, Any]], way: str) -> str:
    """Return the mean and the worst final loss of a way over the tasks that swing."""
    finals = [row["ways"][way]["final"] for row in rows.values() if row["swings"] and way in row["ways"]]
    return f"{geometric(finals):.2f}, {max(finals):.3g}" if finals else "-"


def tables(found: dict[str, Any]) -> str:
    """Return all of it in Markdown: final, best, swing of each task and way."""
    parts = []
    for length, rows in found.items():
        lines = [f"| task | seeds | best threshold | {' | '.join(COMPARED)} |", "|---" * (len(COMPARED) + 3) + "|"]
        for name, row in rows.items():
            cells = [_cell(row["ways"].get(way)) for way in COMPARED]
            calm = "" if row["swings"] else " (does not swing)"
            lines.append(f"| {name}{calm} | {row['seeds']} | {row['best_fixed']} | {' | '.join(cells)} |")
        means = " | ".join(mean_and_worst(rows, way) for way in COMPARED)
        lines.append(f"| **final of those that swing: mean, worst** | | | {means} |")
        parts.append(f"### Length {length}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(way: dict[str, float] | None) -> str:
    return "" if way is None else f"{way['final']:.2f}, {way['best']:.2f}, {way['swing']:.2f}"


def read(path: Path) -> dict[Job, dict[str, Any]]:
    """Return the runs that were recorded so far."""
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(one["task"], one["way"], one["seed"]): one for one in runs}


def main() -> None:
    ways = (*COMPARED, *FIXED)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=RESULTS / "steady-runs.jsonl")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    # The runs of one seed before those of the next: what is there early covers everything.
    jobs = [(task, way, seed) for seed in range(options.seeds) for task in ALL_TASKS for way in options.ways]
    done = read(options.runs)
    missing = [job for job in jobs if job not in done]
    if missing and not options.table:
        with Pool(options.processes) as pool, options.runs.open("a") as file:
            for i, one in enumerate(pool.imap_unordered(run, missing), start=1):
                file.write(json.dumps(one) + "\n")
                file.flush()
                print(f"\r{i} of {len(missing)} runs", end="", flush=True)
        print()
    found = summary(list(read(options.runs).values()))
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradrein": gradrein.__version__,
        "machine": f"{platform.system()} {platform.machine()}, CPU",
    }
    (RESULTS / "steady.json").write_text(json.dumps({"environment": environment, "lengths": found}, indent=1) + "\n")
    (RESULTS / "steady.md").write_text(tables(found))
    print(tables(found))


if __name__ == "__main__":
    main()
