"""Where in the script a change goes, and the lines to write there."""

import os
from typing import TypeAlias

from ..run.run import Run
from .sites import library_of, names_at, optimizer_names, site_of

Snippet: TypeAlias = tuple[str, list[str]]
"""A place, such as "in train.py, below line 33: opt = SGD(...)", and lines."""

_TRAINERS = {"lightning": "lightning", "pytorch_lightning": "lightning", "transformers": "transformers"}


def clipper_lines(run: Run, clip: float | str) -> Snippet:
    """Return the lines that clip as `--clip` does: a `Clipper` for each optimizer, or a trainer's callback."""
    trainer = _trainer(run)
    if trainer:
        lines = [
            f"from gradrein.integrations.{trainer} import MonitorCallback",
            f"Trainer(..., callbacks=[MonitorCallback(clip={_quoted(clip)})])",
        ]
        return "where the trainer is made", lines
    policy = _quoted(clip) if isinstance(clip, str) else f"gradrein.by_norm({clip:g})"
    names = optimizer_names(run) if run.n_optimizers > 1 else []
    names = names or [names_at(site_of(run, "step")).get("optimizer", "optimizer")]
    made = [f'clipper = gradrein.Clipper({name}, {policy}, nonfinite="skip")' for name in names]
    if len(made) > 1:
        made = [line.replace("clipper", f"clipper_{i}", 1) for i, line in enumerate(made, start=1)]
    return _below_the_optimizer(run), ["import gradrein", *made]


def rate_lines(run: Run, rate: float) -> Snippet:
    """Return the line that sets the learning rate."""
    if _trainer(run) == "transformers":
        return "where the trainer is made", [f"TrainingArguments(..., learning_rate={rate:g})"]
    made = site_of(run, "made")
    where = "where the optimizer is made" if made is None else f"{_file(made)}, line {made['line']}: {made['text']}"
    return where, [f"{run.optimizer}(..., lr={rate:g})"]


def _below_the_optimizer(run: Run) -> str:
    made, step = site_of(run, "made"), site_of(run, "step")
    if made is not None:
        return f"{_file(made)}, below line {made['line']}: {made['text']}"
    if step is not None and not library_of(step):
        return f"{_file(step)}, once, before the loop of line {step['line']}: {step['text']}"
    return "once, after the optimizer is made and before the training loop"


def _trainer(run: Run) -> str:
    library = library_of(site_of(run, "backward")) or library_of(site_of(run, "step"))
    return _TRAINERS.get(library, "")


def _file(site: dict[str, str]) -> str:
    return f"in {os.path.basename(site['file'])}"


def _quoted(clip: float | str) -> str:
    return f'"{clip}"' if isinstance(clip, str) else f"{clip:g}"
