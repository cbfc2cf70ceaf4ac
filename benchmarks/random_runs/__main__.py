"""Random training runs, and what would have helped each of them.

python benchmarks/random_runs build          # the tasks to build on; goes on where it was stopped
python benchmarks/random_runs held           # those to judge by, once
python benchmarks/random_runs build --collect  # the signs of the runs so far into benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "random_runs"
RESULTS = ROOT / "benchmarks" / "results" / "random-runs.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("build", "held"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--count", type=int, help="only so many tasks")
    parser.add_argument("--collect", action="store_true", help="only collect what is there")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.collect:
        return collect(options.which, FOLDER)
    return run_all(options.which, FOLDER, options.jobs, options.count)


def run_all(which: str, folder: Path, jobs: int, count: int | None = None) -> None:
    """Run the tasks of a list that are not done yet, and add a line for each to its file."""
    from ranges import NUMBERS
    from run import measure
    from task import GROUP

    (folder / "records").mkdir(parents=True, exist_ok=True)
    done = {line["task"]["number"] // GROUP for line in read(which, folder)}
    wanted = sorted({number // GROUP for number in list(NUMBERS[which])[:count]})
    todo = [(which, group, str(folder / "records")) for group in wanted if group not in done]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, (folder / f"{which}.jsonl").open("a") as out:
        for i, results in enumerate(pool.imap_unordered(measure, todo), start=1):
            out.write("".join(json.dumps(result) + "\n" for result in results))
            out.flush()
            left = (time.monotonic() - started) / i * (len(todo) - i)
            _show(GROUP * (len(wanted) - len(todo) + i), GROUP * len(wanted), left)


def read(which: str, folder: Path = FOLDER) -> list[dict]:
    """Return the results of a list so far, by number."""
    path = folder / f"{which}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(lines, key=lambda line: line["task"]["number"])


def collect(which: str, folder: Path) -> None:
    """Put the results of a list, with the signs of each run from its record, into the file of results."""
    from gradrein.watch.analysis.signs import measure
    from run import record_path

    lines = read(which, folder)
    for line in lines:
        for seed in line["seeds"]:
            run = read_back(record_path(folder / "records", line["task"], seed["seed"]))
            seed["signs"] = {} if seed["base"] is None else {k: round(v, 4) for k, v in measure(run).items()}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**known, which: lines}, separators=(",", ":")) + "\n")
    print(f"{len(lines)} tasks in {RESULTS.relative_to(ROOT)}")


def read_back(record: Path) -> Any:
    """Return the run of a record, with the losses that are read from what it printed."""
    from run import with_curves

    from gradrein.watch import read_run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in with_curves(record)))
        return read_run(path)


def _show(done: int, of: int, left: float) -> None:
    bar = "#" * (30 * done // of)
    print(f"\r[{bar:<30}] {done}/{of}, {left / 60:.0f} min left ", end="" if done < of else "\n", file=sys.stderr)


if __name__ == "__main__":
    main()
