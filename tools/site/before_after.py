"""Draw the picture of the README, a script before and after clipping: python tools/site/before_after.py.

It writes docs/steady.png. `make docs` does not run it: without clipping the script is chaotic, and another processor
draws another curve.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
from live import ROOT, before_and_after
from matplotlib import pyplot as plt

PICTURE = ROOT / "docs" / "steady.png"
COLORS = {"before": "#d2691e", "after": "#2563c9"}


def running_median(values: list[float], width: int = 31) -> list[float]:
    """Return the median of each value and those around it."""
    half = width // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def main(path: Path = PICTURE) -> None:
    """Run the script twice and draw both losses."""
    before, after = before_and_after()
    figure, (train, test) = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained")
    for name, run in (("before", before.run), ("after", after.run)):
        train.plot(run.steps, run.loss, color=COLORS[name], alpha=0.3, linewidth=0.7)
        train.plot(run.steps, running_median(run.loss), color=COLORS[name], label=name)
        assert run.test is not None
        test.plot(run.test.steps, run.test.values, ".-", color=COLORS[name], label=name)
    for axes, title in ((train, "training loss, with its running median"), (test, "test loss")):
        axes.set_title(title, fontsize=11)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        ticks = [tick for tick in (0.01, 0.03, 0.1, 0.3, 1, 3, 10) if low < tick < high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
