"""The demonstration: watch a script that swings, read why, run it again with the advised clipping, compare.

python examples/demo_steady.py [folder for the records and the page [arguments of the script]]
"""

import os
import subprocess
import sys
from pathlib import Path

from bridle.watch import read_report

SCRIPT = Path(__file__).with_name("weighted_power_loss.py")
SEEDS = 5


def watch(record: Path, extra: list[str], *options: str) -> None:
    """Run the script under `bridle watch`. What it prints about the test set is read into the record."""
    command = [sys.executable, "-m", "bridle", "watch", "--record", str(record), *options, str(SCRIPT), *extra]
    print(f"\n$ bridle watch --record {record.name} {' '.join(options)} examples/{SCRIPT.name}\n", flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def watch_until_advised(record: Path, extra: list[str]) -> tuple[list[str], str]:
    """Watch the script with one seed after another until clipping is advised; most seeds swing, not all do."""
    for seed in range(SEEDS):
        arguments = [*extra, "--seed", str(seed)]
        watch(record, arguments)
        advised = read_report(record).advice.policy
        if advised is not None:
            return arguments, advised
    sys.exit(f"No clipping was advised for any of {SEEDS} seeds, so there is nothing to compare.")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before, after, page = folder / "before.jsonl", folder / "after.jsonl", folder / "steady.html"
    arguments, advised = watch_until_advised(before, sys.argv[2:])
    watch(after, arguments, "--clip", advised)
    reports = [read_report(before), read_report(after)]
    reports[1].write_page(page, before=reports[0])
    print(f"\n{'':66}{'before':>10}{'after':>10}")
    for (name, old), new in zip(reports[0].summary().items(), reports[1].summary().values(), strict=True):
        print(f"{name:66}{old:10.4g}{new:10.4g}")
    print(f"\nBoth curves, findings and advice: {page}")


if __name__ == "__main__":
    main()
