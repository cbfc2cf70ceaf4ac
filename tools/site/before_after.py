"""Draw the picture of the README from the demonstration: python tools/site/before_after.py [folder of `make demo`].

It writes docs/steady.png: the script as it is, and with the change that `gradrein watch --try` keeps. Without a folder
the demonstration is run first. `make docs` does not run this: the script is chaotic as it stands, and another processor
draws another curve.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

import matplotlib

matplotlib.use("Agg")
from live import ROOT
from matplotlib import pyplot as plt

from gradrein.watch import Run, read_run

PICTURE = ROOT / "docs" / "steady.png"
WIDTH = 31


def running_median(values: list[float]) -> list[float]:
    """Return the median of each value and those around it."""
    return [median(values[max(0, i - WIDTH // 2) : i + WIDTH // 2 + 1]) for i in range(len(values))]


def end(run: Run) -> float:
    """Return the mean of the last tenth of the test losses."""
    return fmean(run.test.values[-max(1, len(run.test) // 10) :])


def draw(before: Run, after: Run) -> None:
    """Draw both losses of both runs, with letters that are read at a third of the size."""
    plt.rcParams.update({"font.size": 15, "axes.titlesize": 16})
    figure, (train, test) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", facecolor="white")
    for name, run, color in (("as it is", before, "#c2570c"), ("with the change that is kept", after, "#1d4ed8")):
        train.plot(run.steps, run.loss, color=color, alpha=0.25, linewidth=0.7)
        train.plot(run.steps, running_median(run.loss), color=color, linewidth=2)
        test.plot(run.test.steps, run.test.values, ".-", color=color, linewidth=2, label=name)
    for axes, title in ((train, "training loss"), (test, "test loss")):
        axes.set_title(title)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in (0.001, 0.01, 0.1, 0.3, 1, 3, 10, 100) if low < tick < high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xticks([0, 400, 800])
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper center", ncols=2)
    figure.savefig(PICTURE, dpi=150)


def main() -> None:
    """Draw a demonstration that was run, or run it."""
    with tempfile.TemporaryDirectory() as folder:
        demo = Path(sys.argv[1] if len(sys.argv) > 1 else folder)
        if len(sys.argv) == 1:
            subprocess.run([sys.executable, ROOT / "examples" / "demo_steady.py", demo], check=True)
        runs = {file.stem: read_run(file) for file in (demo / "try").glob("*.jsonl")}
    draw(runs["as-it-is"], min(runs.values(), key=end))


if __name__ == "__main__":
    main()
