"""The demonstration: watch a script that swings, measure which change steadies it, compare. Takes less than a minute.

python examples/demo_steady.py [folder for the records and the page [arguments of the script]]

The script is chaotic as it stands: a processor that adds in another order gives other numbers. One record does not tell
which change is best, so `--try` measures six. With `--seed` 0 to 4, on one machine, the change that it keeps ended 3 to
32 times lower than the script as it is; the change advised first ended lower for four of these five.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from gradrein.watch import Run, read_report, read_run

SCRIPT = Path(__file__).with_name("weighted_power_loss.py")


def watch(*options: str) -> None:
    """Show a command, and run it."""
    print(f"\n$ gradrein watch {' '.join(options)}\n".replace(f"{SCRIPT.parent}", "examples"), flush=True)
    done = subprocess.run([sys.executable, "-m", "gradrein", "watch", *options], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def end(run: Run) -> float:
    """Return the mean of the last tenth of the test losses that the script prints."""
    if run.test is None:
        sys.exit(f"No test loss was read from what {SCRIPT.name} prints.")
    return fmean(run.test.values[-max(1, len(run.test) // 10) :])


def swing(run: Run) -> float:
    """Return the mean of log10(test loss / lowest so far): 0 for a curve that only falls."""
    losses = run.test.values
    return fmean(math.log10(loss / min(losses[: i + 1])) for i, loss in enumerate(losses))


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for old in (*folder.glob("*.jsonl"), *folder.glob("try/*.jsonl")):
        old.unlink()
    command = [str(SCRIPT), *sys.argv[2:]]
    watch("--record", str(folder / "watched.jsonl"), *command)
    watch("--try", "--record", str(folder / "try"), *command)
    # In the order of the advice: as it is, what was advised first, the others
    tried = [read_run(file) for file in sorted((folder / "try").glob("*.jsonl"), key=lambda f: f.stat().st_mtime)]
    kept = min(tried, key=end)
    print(f"\nThe report of what is kept ({kept.path.stem}):\n\n{read_report(kept.path)}")
    print(f"{'':42}{'train end':>10}{'test end':>10}{'lowest':>10}{'swing':>8}")
    for name, run in (("as it is", tried[0]), ("advised first", tried[1]), ("kept by --try", kept)):
        trained = fmean(run.loss[-len(run.loss) // 10 :])
        label = f"{name} ({run.path.stem})" if run is not tried[0] else name
        falls = "   still falling" if "still falling" in read_report(run.path).verdict.what else ""
        print(f"{label:42}{trained:10.3g}{end(run):10.3g}{min(run.test.values):10.3g}{swing(run):8.2f}{falls}")
    print(f"\nThe curves: {folder / 'try' / 'try.html'}")


if __name__ == "__main__":
    main()
