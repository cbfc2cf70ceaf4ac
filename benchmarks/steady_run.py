"""One run of `steady.py`: a task, a way to hold it, a seed; its test loss looked at forty times per length."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gradrein
from gradrein.watch.analysis.advice import TRY
from steady_task import Task
from steady_tasks import SEEN
from steady_tasks_healthy import HEALTHY
from steady_tasks_healthy_unseen import HEALTHY_UNSEEN
from steady_tasks_second import SECOND
from steady_tasks_third import THIRD
from steady_tasks_unseen import UNSEEN

LISTS = {
    "seen": SEEN | SECOND,
    "unseen": UNSEEN,
    "third": THIRD,
    "healthy": HEALTHY,
    "healthy_unseen": HEALTHY_UNSEEN,
}
LENGTHS = (1, 4)
LOOKS = 40
GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
FIXED = {f"by_norm({threshold:g})": gradrein.by_norm(threshold) for threshold in GRID}
WAYS = {"ZClip": "zscore", "AutoClip": "quantile", "AdaGC": "running_norm", "auto": "auto", **FIXED}


def run(job: tuple[str, str, str, int]) -> list[dict[str, Any]]:
    """Run one job (list, task, way, seed) and return what became of the test loss at each length.

    A run that is watched is followed by one with what was advised after its first quarter, if anything was.
    """
    which, name, way, seed = job
    torch.set_num_threads(1)
    make = LISTS[which][name]
    found = {"list": which, "task": name, "way": way, "seed": seed}
    if way != "watched":
        task = make(seed, 1 / 3) if way == "lr/3" else make(seed)
        return [{**found, **_lengths(_curve(_clipped(task, WAYS.get(way))))}]
    watched = _watched(make(seed))
    if which.startswith("healthy"):
        return [{**found, **watched}]
    advised = _with_options(make, seed, watched["1x"]["advised"])
    return [{**found, **watched}, {**found, "way": "advised", **_lengths(_curve(advised))}]


def _with_options(make: Callable[..., Task], seed: int, options: str) -> Task:
    """Return a task as `gradrein watch` with these options would run it: as it is where they measure."""
    words = options.removeprefix(TRY).split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    clip = given.pop("--clip", None)
    task = make(seed, float(given.pop("--lr-scale", 1)))
    assert not given
    return _clipped(task, clip if clip in (None, "auto") else gradrein.by_norm(float(clip)))


def _clipped(task: Task, policy: Any) -> Task:
    """Attach a clipper of its own to every optimizer of a task."""
    for optimizer, _ in task.turns if policy is not None else ():
        gradrein.Clipper(optimizer, policy, nonfinite="skip")
    return task


def _curve(task: Task, lengths: int = LENGTHS[-1]) -> list[float]:
    """Train, and return the test loss at the start and at every look; at most ten times that at the start."""
    curve = [task.measure()]
    for step in range(1, lengths * task.steps + 1):
        task.step()
        if step * LOOKS // task.steps > (step - 1) * LOOKS // task.steps:
            curve.append(_capped(task.measure(), curve[0]))
    return curve


def _capped(loss: float, first: float) -> float:
    return min(loss, 10 * first) if math.isfinite(loss) else 10 * first


def _lengths(curve: list[float]) -> dict[str, dict[str, Any]]:
    return {f"{length}x": judge(curve[: length * LOOKS + 1]) for length in LENGTHS}


def judge(curve: list[float]) -> dict[str, Any]:
    """Return the final loss (mean of the last three), the lowest, the lowest such mean, and the swing."""
    assert min(curve) >= 0, "ratios are of losses that are not negative"
    curve = [max(loss, 1e-300) for loss in curve]  # zero has no ratio to anything
    lowest, above = curve[0], []
    for loss in curve[1:]:
        lowest = min(lowest, loss)
        above.append(math.log10(loss / lowest))
    final = statistics.fmean(curve[-3:])
    return {
        "final": final,
        "best": lowest,
        "settled": min(statistics.fmean(curve[i : i + 3]) for i in range(len(curve) - 2)),
        "swing": statistics.fmean(above),
        "swings": _rises(curve[len(curve) // 4 :]) >= 2 or final > 2 * lowest,
    }


def _rises(curve: list[float]) -> int:
    """Return how often a curve turns and rises by more than a fifth."""
    count, low, high, rising = 0, curve[0], curve[0], False
    for loss in curve[1:]:
        if not rising and loss > 1.2 * low:
            count, rising, high = count + 1, True, loss
        elif rising and loss < high / 1.2:
            rising, low = False, loss
        low, high = min(low, loss), max(high, loss)
    return count


def _watched(task: Task, lengths: int = LENGTHS[-1]) -> dict[str, dict[str, Any]]:
    """Train without clipping under a monitor; return at each length what it finds and advises, and what is true."""
    found: dict[str, dict[str, Any]] = {}
    curve = [task.measure()]
    with (
        tempfile.TemporaryDirectory() as folder,
        gradrein.Monitor(task.model, record=Path(folder) / "run.jsonl") as monitor,
    ):
        for length in range(1, lengths + 1):
            for step in range(1, task.steps + 1):
                task.step()
                if step * LOOKS // task.steps > (step - 1) * LOOKS // task.steps:
                    loss = task.measure()
                    curve.append(_capped(loss, curve[0]))
                    monitor.note("test", loss=loss)
            if length in LENGTHS:
                report = monitor.report()
                names = sorted({finding.name for finding in report.findings})
                first = next((action.try_with for action in report.advice.actions), "")
                found[f"{length}x"] = {**judge(curve), "findings": names, "advised": first}
    return found
