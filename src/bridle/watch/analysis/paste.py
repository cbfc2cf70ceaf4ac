"""The lines that make a change, in the script's own names, and where in the script they go."""

import ast
import os
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
        where: Where they go, such as "train.py, before line 44: optimizer.step()".
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
    if library or step is None or not _is_plain_step(step["text"]):
        return _paste_clipper(run, f"bridle.by_norm({limit:g})")
    # Gradients are complete, and the model has its name, where the script steps: after a backward pass neither is sure.
    model = _names(run).get("model")
    target = f"{model}.parameters()" if model else f'[p for g in {_optimizer(run)}.param_groups for p in g["params"]]'
    line = " " * step["indent"] + f"torch.nn.utils.clip_grad_norm_({target}, {limit:g})"
    return Paste(f"{os.path.basename(step['file'])}, before line {step['line']}: {step['text']}", [line])


def paste_auto(run: Run) -> Paste:
    """Return the lines that clip with `auto`."""
    return _paste_clipper(run, "bridle.policies.ByOvershoot()")


def paste_rate(run: Run, rate: float) -> Paste:
    """Return the lines that set the learning rate."""
    step = site_of(run, "step")
    file = f"{os.path.basename(step['file'])}, " if step is not None and not _library(step) else ""
    return Paste(f"{file}where the optimizer is made", [f"{run.optimizer}(..., lr={rate:g})"])


def site_of(run: Run, site: str) -> dict[str, Any] | None:
    """Return where the script calls `backward`, or `step` of this optimizer; None where that is not known."""
    found = (n for n in run.notes if n.get("site") == site and n.get("opt", run.opt) == run.opt)
    return next(found, None)


def _paste_clipper(run: Run, policy: str) -> Paste:
    """Return lines that are right whatever the loop looks like: closures, scalers, several backward passes."""
    step = site_of(run, "step")
    file = f"{os.path.basename(step['file'])}, " if step is not None and not _library(step) else ""
    line = f"clipper = bridle.Clipper({_optimizer(run)}, {policy})"
    return Paste(f"{file}once, after the optimizer is made and before the training loop", ["import bridle", line])


def _is_plain_step(text: str) -> bool:
    """Return whether a line of the script is the statement `optimizer.step()` and nothing else."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):  # a part of a statement, or cut off
        return False
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    is_step = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    return is_step and isinstance(call, ast.Call) and not call.args and not call.keywords


def _library(site: dict[str, Any] | None) -> str:
    return str(site.get("library", "")) if site is not None else ""


def _names(run: Run) -> dict[str, Any]:
    step = site_of(run, "step")
    names = step.get("names", {}) if step is not None else {}
    return names if isinstance(names, dict) else {}


def _optimizer(run: Run) -> str:
    return _names(run).get("optimizer") or "optimizer"
