"""How often a report says that a run still falls, and how often that is right: the run twice as long ends lower.

python benchmarks/random_runs/longer.py     # the first 300 tasks to build on, two seeds, as they are and as advised

A run of twice as many steps has its schedule stretched. The same of twice the learning rate, the other thing that a
report then says. Writes benchmarks/results/random-runs-longer.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from judge import interval
from looks import final
from ranges import NUMBERS, SEEDS
from run import write_record
from table import _read, _said, _way
from task import GROUP, draw
from together import Way, train_together

from gradrein.watch.analysis.losses import is_long_enough, judged_loss, still_falls

RESULTS = Path(__file__).parents[1] / "results" / "random-runs-longer.json"
COUNT = 300
LOWER = {"lower": 1.0, "at least a tenth lower": 0.9}


def measure(tasks: list[dict[str, Any]], ways: list[Way], folder: Path) -> tuple[list[dict[str, Any]], list[Way]]:
    """Return of each run that is long enough whether it still falls and what others end at; and what is advised."""
    traces = train_together(tasks, ways, traced=True)
    ends = [final(looks) for looks in torch.stack(traces.looks, 1).tolist()]
    longer = [{**task, "steps": 2 * task["steps"]} for task in tasks]
    faster = [Way(way.task, way.seed, way.clip, 2 * way.lr_scale) for way in ways]
    others = {"twice as long": _ends(longer, ways), "twice the learning rate": _ends(tasks, faster)}
    found, advised = [], []
    for row, way in enumerate(ways):
        write_record(tasks[way.task], way, traces, row, folder / "run.jsonl")
        run = _read(folder / "run.jsonl")
        advised.append(_way(way.task, {"seed": way.seed, **_said(run)}))
        loss = judged_loss(run)
        if ends[row] is not None and is_long_enough(loss):
            after = {name: each[row] for name, each in others.items()}
            found.append({"falls": still_falls(loss), "end": ends[row], **after})
    return found, advised


def _ends(tasks: list[dict[str, Any]], ways: list[Way]) -> list[float | None]:
    return [final(looks) for looks in torch.stack(train_together(tasks, ways).looks, 1).tolist()]


def table(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many still fall, and how many of these and of the others end lower."""
    found: dict[str, Any] = {"runs": len(runs), "still fall": sum(run["falls"] for run in runs)}
    for falls, label in ((True, "of those that fall"), (False, "of the others")):
        some = [run for run in runs if run["falls"] == falls]
        for other in ("twice as long", "twice the learning rate"):
            for words, times in LOWER.items():
                hits = sum(run[other] is not None and run[other] < times * run["end"] for run in some)
                low, high = interval(hits / 2, len(some) / 2)  # as if the two runs of a task were one
                found[f"{label}, {other} ends {words}"] = f"{hits} of {len(some)} ({low:.0%} to {high:.0%})"
    return found


def main() -> None:
    as_it_is, as_advised = [], []
    with tempfile.TemporaryDirectory() as name:
        for first in NUMBERS["build"][:COUNT:GROUP]:
            tasks = [draw("build", number) for number in range(first, first + GROUP)]
            torch.manual_seed(first // GROUP)
            runs, advised = measure(tasks, [Way(i, seed) for i in range(GROUP) for seed in SEEDS], Path(name))
            as_it_is += runs
            changed = [way for way in advised if way != Way(way.task, way.seed)]
            as_advised += measure(tasks, changed, Path(name))[0] if changed else []
    tables = {"as it is": table(as_it_is), "as advised first": table(as_advised)}
    RESULTS.write_text(json.dumps(tables, indent=1) + "\n")
    print(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
