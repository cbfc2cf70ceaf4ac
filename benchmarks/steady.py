"""Does it hold? Every way to clip on tasks that swing, and what `gradrein watch` finds there and on healthy runs.

    python benchmarks/steady.py                      all that is missing, then the tables
    python benchmarks/steady.py --lists unseen --ways auto none --seeds 3
    python benchmarks/steady.py --table              the tables of what was run so far
    python benchmarks/steady.py --table --keep benchmarks/results/steady.json
                                                     the same, with what an earlier summary has more seeds of

Twenty-four tasks that `auto` was built on (`steady_tasks.py`; `steady_tasks_second.py`, unseen until it was changed for
what they showed); thirteen that were written down first and then run (`steady_tasks_unseen.py`): `auto` has not been
changed since, the advice has, for what they showed; and eight that were written down before the advice was changed and
run with it once, unchanged (`steady_tasks_third.py`; one of them, `recall`, does not swing: it learns well by itself).
Eight healthy runs of each kind for false alarms (`steady_tasks_healthy.py`, `steady_tasks_healthy_unseen.py`).

A run is of length 4x; what it was at 1x is its first quarter. The test loss is looked at forty times per length; one
that is not finite, or above ten times that at the start, counts as ten times that at the start.
- final, best: the mean of the last three test losses, and the lowest, over those of the fixed threshold that ended
  lowest, chosen from eight by looking at these very runs; geometric means over the seeds;
- swing: the mean of log10(test loss / lowest so far); 0 for a curve that only falls;
- swings: the test loss turns and rises by more than a fifth at least twice after the first quarter, or ends above
  twice its lowest. Seen: such a run without clipping has a finding of `gradrein watch`. A task swings if a run of it
  does, at either length; means are over those tasks, and over all;
- final over lowest: the final loss over the lowest mean of three looks in a row, of the worst run;
- advised: with the first change that is advised after a run of length 1x without clipping, from the start, for 4x;
  where none is advised, or first to measure with `--try`, as it was;
- tried: of none, advised, `auto` and lr/3 the one that ended lowest at 1x, much as `gradrein watch --try` picks. Only
  its length of 4x says anything.

Every run is a line in `results/steady-runs.jsonl` (not kept in the repository) as soon as it is done, and is not run
again: stop and start as you like. Every process has one thread. Nothing here is a timing. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import torch

import gradrein
from steady_run import FIXED, LISTS, run
from steady_table import keep, summary, tables

RESULTS = Path(__file__).parent / "results"
COMPARED = ("none", "advised", "auto", "tried", "ZClip", "AutoClip", "AdaGC", "lr/3")
WAYS = ("watched", "none", "auto", "lr/3", *FIXED, "ZClip", "AutoClip", "AdaGC")
Job = tuple[str, str, str, int]


def jobs(lists: list[str], ways: list[str], seeds: range) -> Iterator[Job]:
    """Yield all runs, those of one seed before those of the next: what is there early covers everything."""
    for seed in seeds:
        for which in lists:
            for task in LISTS[which]:
                yield from ((which, task, way, seed) for way in ways if way == "watched" or "healthy" not in which)


def read(path: Path) -> dict[Job, dict[str, Any]]:
    """Return the runs that were recorded so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    runs = [json.loads(line) for line in lines]
    return {(r["list"], r["task"], r["way"], r["seed"]): r for r in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lists", nargs="+", default=list(LISTS), choices=LISTS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=RESULTS / "steady-runs.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "steady.json")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--keep", type=Path, help="an earlier summary, for what has more seeds there")
    options = parser.parse_args()
    done = read(options.runs)
    seeds = range(options.first, options.first + options.seeds)
    missing = [job for job in jobs(options.lists, options.ways, seeds) if job not in done]
    if missing and not options.table:
        with Pool(options.processes) as pool, options.runs.open("a") as file:
            for i, found in enumerate(pool.imap_unordered(run, missing), start=1):
                file.writelines(json.dumps(one) + "\n" for one in found)
                file.flush()
                print(f"\r{i} of {len(missing)} runs", end="", flush=True)
        print()
    found = {
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gradrein": gradrein.__version__,
            "machine": f"{platform.system()} {platform.machine()}, CPU",
        },
        **summary(list(read(options.runs).values()), COMPARED, list(FIXED)),
    }
    if options.keep is not None:
        found = keep(found, json.loads(options.keep.read_text()))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(tables(found))
    print(tables(found))


if __name__ == "__main__":
    main()
