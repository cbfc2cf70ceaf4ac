"""Random training runs, and what would have helped each of them.

python benchmarks/random_runs build          # the tasks to build on; goes on where it was stopped
python benchmarks/random_runs held           # those to judge by
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "random_runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("build", "held"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--count", type=int, help="only so many tasks")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    run_all(options.which, FOLDER, options.jobs, options.count)


def run_all(which: str, folder: Path, jobs: int, count: int | None = None) -> None:
    """Run the tasks of a list that are not done yet, and add a line for each to its file."""
    from ranges import NUMBERS
    from run import measure

    (folder / "records").mkdir(parents=True, exist_ok=True)
    done = {line["task"]["number"] for line in read(which, folder)}
    wanted = list(NUMBERS[which])[:count]
    todo = [(which, number, str(folder / "records")) for number in wanted if number not in done]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, (folder / f"{which}.jsonl").open("a") as out:
        for i, result in enumerate(pool.imap_unordered(measure, todo), start=1):
            out.write(json.dumps(result) + "\n")
            out.flush()
            _show(len(wanted) - len(todo) + i, len(wanted), (time.monotonic() - started) / i * (len(todo) - i))


def read(which: str, folder: Path = FOLDER) -> list[dict]:
    """Return the results of a list so far, by number."""
    path = folder / f"{which}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(lines, key=lambda line: line["task"]["number"])


def _show(done: int, of: int, left: float) -> None:
    bar = "#" * (30 * done // of)
    print(f"\r[{bar:<30}] {done}/{of}, {left / 60:.0f} min left ", end="" if done < of else "\n", file=sys.stderr)


if __name__ == "__main__":
    main()
