"""One task: as it is, under a monitor, and with each alternative; with two seeds."""

from __future__ import annotations

import contextlib
import io
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from looks import LOOKS, falls_on, final, short
from printing import NO_TEST_LOSS, printed
from ranges import SEEDS
from task import Training, draw
from together import train_together

import gradrein
from gradrein.watch import Run, read_run

_FAR = 3.0  # a training loss above so many times that at the start belongs to a run that has diverged
# Clipping as parts of the median norm, and what the learning rate is multiplied by: the eight that truth is taken from.
EIGHT: dict[str, tuple[float | str | None, float]] = {
    "clip 3": (3.0, 1.0),
    "clip 1": (1.0, 1.0),
    "clip 1/3": (1 / 3, 1.0),
    "clip 1/10": (0.1, 1.0),
    "lr 1/3": (None, 1 / 3),
    "lr 1/10": (None, 0.1),
    "lr 1/30": (None, 1 / 30),
    "clip 1, lr 1/3": (1.0, 1 / 3),
}
# What else may be advised
OURS: dict[str, tuple[float | str | None, float]] = {"auto": ("auto", 1.0), "auto, lr 1/3": ("auto", 1 / 3)}


def measure(job: tuple[str, int, str]) -> dict[str, Any]:
    """Run a task (of which list, its number, the folder of records) in every way, with every seed."""
    which, number, folder = job
    torch.set_num_threads(1)
    task = draw(which, number)
    found = [_measure_seed(task, seed, Path(folder)) for seed in SEEDS]
    ways = {**EIGHT, **OURS}
    models = [(one["seed"], one["norm"], *way) for one in found for way in ways.values()]
    ends = iter(train_together(task, models))
    return {"task": task, "seeds": [{**one, "ways": {name: next(ends) for name in ways}} for one in found]}


def record_path(folder: Path, task: dict[str, Any], seed: int) -> Path:
    """Return where the record of a run is."""
    return folder / f"{task['which']}-{task['number']}-{seed}.jsonl"


def _measure_seed(task: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    record = record_path(folder, task, seed)
    base = watched(task, seed, record)
    return {
        "seed": seed,
        "norm": short(usual_norm(read_run(record))),
        "base": final(base),
        "curve": [short(v) for v in base],
    }


def watched(task: dict[str, Any], seed: int, record: Path, clip: Any = None, lr_scale: float = 1.0) -> list[float]:
    """Run a task as `gradrein watch` does, and return its test losses; what it prints is put beside the record."""
    for path in (record, _beside(record)):
        path.unlink(missing_ok=True)
    training, spoken = Training(task, seed, lr_scale), []
    prints = task["prints"]
    with _silent(), gradrein.Monitor(training.model, training.optimizer, record=record, clip=clip):
        looks: list[float] = []
        since: list[float] = []
        for step in range(1, task["steps"] + 1):
            since.append(training.step())
            if falls_on(step, task["steps"], prints):
                loss = training.test() if task["print"] not in NO_TEST_LOSS else math.nan
                epoch = step * prints // task["steps"]
                spoken.append([step, printed(task["print"], epoch, prints, statistics.fmean(since), loss)])
                print(spoken[-1][1], end="")
                since.clear()
            if falls_on(step, task["steps"], LOOKS):
                looks.append(training.look())
    _beside(record).write_text(json.dumps(spoken))
    return looks


def usual_norm(run: Run) -> float:
    """Return the median norm before the run diverged: while its loss was at most three times that at the start."""
    start = statistics.median([v for v in run.loss[:5] if math.isfinite(v)] or [math.nan])
    healthy = []
    for norm, loss in zip(run.norm, run.loss, strict=True):
        if not math.isfinite(norm) or not math.isfinite(loss):
            break
        if loss <= _FAR * start or start <= 0:
            healthy.append(norm)
    return statistics.median(healthy) if healthy else math.nan


def _beside(record: Path) -> Path:
    return record.with_suffix(".printed.json")


class _Stream(io.StringIO):
    """One whose `write` may be shadowed, as that of a terminal."""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(_Stream()), contextlib.redirect_stderr(_Stream()):
        yield
