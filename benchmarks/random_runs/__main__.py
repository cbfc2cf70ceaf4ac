"""Random training runs, and what would have helped each of them.

python benchmarks/random_runs build          # the tasks to build on, of four lists; goes on where it was stopped
python benchmarks/random_runs last           # those to judge by, once
python benchmarks/random_runs calibrate      # fit to the tasks to build on what reports go by: analysis/calibrated.json
python benchmarks/random_runs judge          # what reports say of those to build on: benchmarks/results/random-runs.*
python benchmarks/random_runs final          # add those to judge by: once, when everything is fixed
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
    parser.add_argument("which", choices=("build", "last", "calibrate", "judge", "final"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--count", type=int, help="only so many tasks")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from ranges import TO_BUILD_ON

    if options.which == "calibrate":
        return calibrate(FOLDER)
    if options.which == "judge":
        return judge(FOLDER, TO_BUILD_ON, {"tables": {}})
    if options.which == "final":
        return judge(FOLDER, ("last",), json.loads(RESULTS.read_text()))
    for which in TO_BUILD_ON if options.which == "build" else ("last",):
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
            _show(len(wanted) - len(todo) + i, len(wanted), left)


def read(which: str, folder: Path = FOLDER) -> list[dict]:
    """Return the results of a list so far, by number."""
    path = folder / f"{which}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(lines, key=lambda line: line["task"]["number"])


def calibrate(folder: Path) -> None:
    """Measure the signs of the tasks to build on, and write the constants."""
    from calibrate import TARGET
    from calibrate import calibrate as fitted
    from ranges import TO_BUILD_ON
    from table import add_signs, signs_after

    lines = [line for which in TO_BUILD_ON for line in read(which, folder)]
    add_signs(lines, folder / "records")
    TARGET.write_text(fitted(lines, lambda runs: signs_after(runs, folder / "records")))
    print(f"{TARGET.relative_to(ROOT)}: from {len(lines)} tasks")


def judge(folder: Path, names: tuple[str, ...], results: dict) -> None:
    """Add what reports say of the runs of these lists to results, and write these and their page."""
    from table import page, reports, table

    for which in names:
        results[which] = read(which, folder)
        reports(results[which], folder / "records")
        results["tables"][which] = table(results[which])
    RESULTS.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    RESULTS.with_suffix(".md").write_text(page(results["tables"]))
    print(page(results["tables"]))


def _show(done: int, of: int, left: float) -> None:
    bar = "#" * (30 * done // of)
    print(f"\r[{bar:<30}] {done}/{of} forms, {left / 60:.0f} min left ", end="" if done < of else "\n", file=sys.stderr)


if __name__ == "__main__":
    main()
