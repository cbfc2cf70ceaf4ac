"""The lines that make a change, in the script's own names, and where in the script they go."""

import os
import re
from dataclasses import dataclass
from typing import Any

from ..run.run import Run

# What a framework that calls `backward` itself is told instead.
_FRAMEWORKS = {
    "lightning": "Trainer(..., gradient_clip_val={limit:g})",
    "pytorch_lightning": "Trainer(..., gradient_clip_val={limit:g})",
    "transformers": "TrainingArguments(..., max_grad_norm={limit:g})",
}


@dataclass(frozen=True)
class Paste:
    """Lines to paste.

    Attributes:
        where: Where they go, such as "train.py, after line 41: loss.backward()".
        lines: The lines, indented as their neighbours are.
    """

    where: str
    lines: list[str]


def paste_clip(run: Run, limit: float) -> Paste:
    """Return the lines that clip at a fixed norm."""
    backward, step = site_of(run, "backward"), site_of(run, "step")
    library = _library(backward) or _library(step)
    if library in _FRAMEWORKS:
        return Paste(f"where the {library} trainer is configured", [_FRAMEWORKS[library].format(limit=limit)])
    if backward is None or library:
        return Paste("where the optimizer is made", [f"bridle.Clipper({_optimizer(run)}, bridle.by_norm({limit:g}))"])
    model = _names(run).get("model")
    target = f"{model}.parameters()" if model else f'[p for g in {_optimizer(run)}.param_groups for p in g["params"]]'
    lines = [f"torch.nn.utils.clip_grad_norm_({target}, {limit:g})"]
    scaler = re.search(r"([\w.]+)\.scale\(", backward["text"])
    if scaler:
        lines.insert(0, f"{scaler[1]}.unscale_({_optimizer(run)})")
    return _after(backward, step, lines)


def paste_auto(run: Run) -> Paste:
    """Return the lines that clip with `auto`."""
    step = site_of(run, "step")
    file = f"{os.path.basename(step['file'])}, " if step is not None and not _library(step) else ""
    line = f"bridle.Clipper({_optimizer(run)}, bridle.policies.ByOvershoot())"
    return Paste(f"{file}once, after the optimizer is made and before the training loop", ["import bridle", line])


def paste_rate(run: Run, rate: float) -> Paste:
    """Return the lines that set the learning rate."""
    step = site_of(run, "step")
    file = f"{os.path.basename(step['file'])}, " if step is not None and not _library(step) else ""
    return Paste(f"{file}where the optimizer is made", [f"{run.optimizer}(..., lr={rate:g})"])


def site_of(run: Run, site: str) -> dict[str, Any] | None:
    """Return where the script calls `backward`, or `step` of this optimizer; None where that is not known."""
    found = (n for n in run.notes if n.get("site") == site and n.get("opt", run.opt) == run.opt)
    return next(found, None)


def _after(backward: dict[str, Any], step: dict[str, Any] | None, lines: list[str]) -> Paste:
    where = f"{os.path.basename(backward['file'])}, after line {backward['line']}: {backward['text']}"
    indent = backward["indent"]
    if step is not None and not _library(step) and step["indent"] < indent:
        # Gradients are added up over several backward passes: they are complete before the step.
        where = f"{os.path.basename(step['file'])}, before line {step['line']}: {step['text']}"
        indent = step["indent"]
    return Paste(where, [" " * indent + line for line in lines])


def _library(site: dict[str, Any] | None) -> str:
    return str(site.get("library", "")) if site is not None else ""


def _names(run: Run) -> dict[str, Any]:
    step = site_of(run, "step")
    names = step.get("names", {}) if step is not None else {}
    return names if isinstance(names, dict) else {}


def _optimizer(run: Run) -> str:
    return _names(run).get("optimizer") or "optimizer"
