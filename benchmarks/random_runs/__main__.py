"""Random training runs, and what would have helped each of them.

python benchmarks/random_runs build          # the tasks to build on, of three lists; goes on where it was stopped
python benchmarks/random_runs unseen         # those to judge by, once
python benchmarks/random_runs calibrate      # fit to the tasks to build on what reports go by: analysis/calibrated.py
python benchmarks/random_runs judge          # what reports say of the runs so far: benchmarks/results/random-runs.*
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
RESULTS = ROOT / "benchmarks" / "results" / "random-runs.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("build", "unseen", "calibrate", "judge"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--count", type=int, help="only so many tasks")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.which in ("calibrate", "judge"):
        return {"calibrate": calibrate, "judge": judge}[options.which](FOLDER)
    from ranges import TO_BUILD_ON

    for which in TO_BUILD_ON if options.which == "build" else ("unseen",):
        run_all(which, FOLDER, options.jobs, options.count)
    return None


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


def calibrate(folder: Path) -> None:
    """Measure the signs of the tasks to build on, and write the constants."""
    from calibrate import TARGET
    from calibrate import calibrate as fitted
    from table import add_signs, signs_after

    lines = read("build", folder)
    add_signs(lines, folder / "records")
    TARGET.write_text(fitted(lines, lambda runs: signs_after(runs, folder / "records")))
    print(f"{TARGET.relative_to(ROOT)}: from {len(lines)} tasks")


def judge(folder: Path) -> None:
    """Add what reports say of the runs so far; write results and their page."""
    from table import page, reports, table

    found = {which: read(which, folder) for which in ("build", "held")}
    found = {which: lines for which, lines in found.items() if lines}
    for lines in found.values():
        reports(lines, folder / "records")
    tables = {which: table(lines) for which, lines in found.items()}
    RESULTS.write_text(json.dumps({"tables": tables, **found}, separators=(",", ":")) + "\n")
    RESULTS.with_suffix(".md").write_text(page(tables))
    print(page(tables))


def _show(done: int, of: int, left: float) -> None:
    bar = "#" * (30 * done // of)
    print(f"\r[{bar:<30}] {done}/{of}, {left / 60:.0f} min left ", end="" if done < of else "\n", file=sys.stderr)


if __name__ == "__main__":
    main()
