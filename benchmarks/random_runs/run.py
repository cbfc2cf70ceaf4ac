"""A group of tasks: each as it is, with a record, and with each alternative; with two seeds."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from looks import LOOKS, falls_on, final, short
from printing import NO_TEST_LOSS, printed
from ranges import NUMBERS, SEEDS
from task import GROUP, Training, draw
from together import Traces, Way, train_together

from gradrein.watch.analysis.signs import LR_SCALE
from gradrein.watch.record.curves.observer import CurveObserver

_FAR = 3.0  # a training loss above so many times that at the start belongs to a run that has diverged
# Clipping as parts of the median norm, and what the learning rate is multiplied by: the eight that truth is taken from,
# and more that may be advised.
WAYS: dict[str, tuple[float | str | None, float]] = {
    "clip 3": (3.0, 1.0),
    "clip 1": (1.0, 1.0),
    "clip 1/3": (1 / 3, 1.0),
    "clip 1/10": (0.1, 1.0),
    "lr 1/3": (None, 1 / 3),
    "lr 1/10": (None, 0.1),
    "lr 1/30": (None, 1 / 30),
    "clip 1, lr 1/3": (1.0, 1 / 3),
    "auto": ("auto", 1.0),
    "auto, lr 1/3": ("auto", 1 / 3),
    "auto, lr 1/10": ("auto", 0.1),
    "clip 1/3, lr 1/3": (1 / 3, 1 / 3),
    "clip 1/10, lr 1/3": (0.1, 1 / 3),
    "clip 1/10, lr 1/10": (0.1, 0.1),
}


def measure(job: tuple[str, int, str]) -> list[dict[str, Any]]:
    """Run a group of tasks (of which list, its number, the folder of records) in every way, with every seed."""
    which, group, folder = job
    torch.set_num_threads(1)
    torch.manual_seed(group)
    tasks = [draw(which, number) for number in NUMBERS[which] if number // GROUP == group]
    base = [Way(i, seed) for i in range(len(tasks)) for seed in SEEDS]
    traces = train_together(tasks, base, traced=True)
    norms = [_usual_norm(traces, row) for row in range(len(base))]
    changed = [
        Way(way.task, way.seed, clip * norm if isinstance(clip, float) else clip, scale)
        for way, norm in zip(base, norms, strict=True)
        for clip, scale in WAYS.values()
    ]
    after = train_together(tasks, changed)
    ends = iter([final(column) for column in _columns(after.looks)])
    found = [{"task": task, "seeds": []} for task in tasks]
    looks = _columns(traces.looks)
    for row, way in enumerate(base):
        write_record(tasks[way.task], way, traces, row, record_path(Path(folder), tasks[way.task], way.seed))
        found[way.task]["seeds"].append({
            "seed": way.seed, "norm": short(norms[row]), "base": final(looks[row]), "first": short(looks[row][0]),
            "ways": {name: next(ends) for name in WAYS},
        })  # fmt: skip
    return found


def _columns(rows: list[torch.Tensor]) -> list[list[float]]:
    return torch.stack(rows, 1).tolist()


def record_path(folder: Path, task: dict[str, Any], seed: int) -> Path:
    """Return where the record of a run is."""
    return folder / f"{task['which']}-{task['number']}-{seed}.jsonl"


def _usual_norm(traces: Traces, row: int) -> float:
    """Return the median norm before a run diverged: while its loss was at most three times that at the start."""
    losses = [loss[row].item() for loss in traces.loss]
    start = statistics.median([v for v in losses[:5] if math.isfinite(v)] or [math.nan])
    healthy = []
    for loss, norms in zip(losses, traces.norms, strict=True):
        norm = torch.linalg.vector_norm(norms[row]).item()
        if not math.isfinite(norm) or not math.isfinite(loss):
            break
        if loss <= _FAR * start or start <= 0:
            healthy.append(norm)
    return max(statistics.median(healthy), 1e-12) if healthy else math.inf


def write_record(task: dict[str, Any], way: Way, traces: Traces, row: int, path: Path) -> None:
    """Write the record that a monitor would have written, with what the script prints beside it."""
    training = Training(task, way.seed)
    lines: list[dict[str, Any]] = [{"gradrein": 2, "torch": torch.__version__, "clip": way.clip, "every": 1}]
    names = [name for name, _ in training.model.named_parameters()]
    group = {k: v for k, v in training.optimizer.param_groups[0].items() if isinstance(v, (int, float)) and k != "lr"}
    lines.append({
        "optimizer": type(training.optimizer).__name__, "opt": 0, "names": names,
        "sizes": [p.numel() for p in training.model.parameters()], "groups": [len(names)],
        "trained": [True] * len(names), "update_stride": 1, "settings": group, "dtypes": ["float32"],
    })  # fmt: skip
    if way.lr_scale != 1:
        lines.append({"note": LR_SCALE, "factor": way.lr_scale, "after": 0})
    spoken, since, steps = [], [], task["steps"]
    for step in range(steps):
        lines.append({**_line(traces, row, step, names), **_clipping(way, traces.clip[step][row].item())})
        since.append(traces.loss[step][row].item())
        if falls_on(step + 1, steps, task["prints"]):
            test = traces.looks[(step + 1) * LOOKS // steps - 1][row].item()
            shown = math.nan if task["print"] in NO_TEST_LOSS else test
            epoch = (step + 1) * task["prints"] // steps
            spoken.append([step + 1, printed(task["print"], epoch, task["prints"], statistics.fmean(since), shown)])
            since.clear()
    path.with_suffix(".printed.json").write_text(json.dumps(spoken))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _line(traces: Traces, row: int, step: int, names: list[str]) -> dict[str, Any]:
    norms = traces.norms[step][row]
    total, cosine = torch.linalg.vector_norm(norms).item(), traces.cosine[step][row].item()
    line = {
        "step": step, "opt": 0, "loss": _word(traces.loss[step][row].item()), "norm": _word(total),
        "peak": _word(total), "norms": [_word(v) for v in norms.tolist()], "lr": [short(traces.lr[step][row].item())],
        "n_steps": 1, "update": _word(traces.update[step][row].item()),
        **({"step_grad_cosine": short(cosine)} if math.isfinite(cosine) else {}),
    }  # fmt: skip
    bad = {name: 1 for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)}
    return {**line, "nonfinite": bad} if bad else line


def _clipping(way: Way, factor: float) -> dict[str, float]:
    if way.clip is None:
        return {}
    return {"clip": short(factor)} | ({"max_norm": short(way.clip)} if isinstance(way.clip, float) else {})


def _word(value: float) -> float | str:
    """Return a number as a record holds it."""
    return short(value) if math.isfinite(value) else str(value)


def with_curves(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record with the losses that are read from what was printed."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    step = 0
    observer = CurveObserver(lines.append, lambda: step)
    for step, text in json.loads(record.with_suffix(".printed.json").read_text()):  # noqa: B007
        observer._printed._read(text + "\n")
        observer.on_step()
    return lines
