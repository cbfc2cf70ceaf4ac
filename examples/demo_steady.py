"""The demonstration: watch a script that swings, read why, run it again with the advised change, compare.

python examples/demo_steady.py [folder for the records and the page [arguments of the script]]

Without clipping the script is chaotic: a processor that adds in another order gives other numbers. So several seeds are
run, and the table shows their medians. The page shows the first.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median

from gradrein.watch import read_report, read_run

SCRIPT = Path(__file__).with_name("weighted_power_loss.py")
SEEDS = range(3)


def watch(record: Path, extra: list[str], *options: str) -> list[float]:
    """Run the script under `gradrein watch`, which reads the test losses it prints. Show them, and return them."""
    command = [sys.executable, "-m", "gradrein", "watch", "--record", str(record), *options, str(SCRIPT), *extra]
    shown = " ".join(["gradrein watch --record", record.name, *options, f"examples/{SCRIPT.name}", *extra])
    print(f"\n$ {shown}\n", flush=True)
    record.unlink(missing_ok=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    test = read_run(record).test
    if test is None:
        sys.exit(f"No test loss was read from what {SCRIPT.name} prints.")
    return test.values


def swing(losses: list[float]) -> float:
    """Return the mean of log10(loss / lowest loss so far): 0 for a curve that only falls."""
    return fmean(math.log10(loss / min(losses[: i + 1])) for i, loss in enumerate(losses))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before, after = [], []
    for seed in SEEDS:
        arguments = [*sys.argv[2:], "--seed", str(seed)]
        records = [folder / f"{name}-{seed}.jsonl" for name in ("before", "after")]
        before.append(watch(records[0], arguments))
        options = [action.try_with for action in read_report(records[0]).advice.actions]
        advised = next((o for o in options if o != "--try"), "--clip auto")  # also a seed that is left alone is clipped
        after.append(watch(records[1], arguments, *advised.split()))
    reports = [read_report(folder / f"{name}-{SEEDS[0]}.jsonl") for name in ("before", "after")]
    page = folder / "steady.html"
    reports[1].write_page(page, before=reports[0])
    print(f"\n{f'median of {len(SEEDS)} seeds':50}{'before':>10}{'after':>10}")
    rows = {"final test loss": lambda run: run[-1], "best test loss": min, "swing of the test loss": swing}
    for name, measure in rows.items():
        print(f"{name:50}{median(map(measure, before)):10.4g}{median(map(measure, after)):10.4g}")
    print(f"\nThe curves, findings and advice of the first seed: {page}")


if __name__ == "__main__":
    main()
