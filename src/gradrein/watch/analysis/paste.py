"""The lines that make a change, in the script's own names, and where in the script they go."""

import ast
import os
from dataclasses import dataclass

from ..run.run import Run
from .sites import Site, library_of, names_at, optimizer_names, site_of, sites_of

_IMPORT = "import gradrein"
_AUTO = "gradrein.policies.ByOvershoot()"
_SKIP = 'nonfinite="skip"'  # as `--clip` does: what was tried is what is pasted


@dataclass(frozen=True)
class Paste:
    """Lines to paste.

    Attributes:
        where: Where they go, such as "train.py, before line 44: optimizer.step()".
        lines: The lines, indented as their neighbours are.
    """

    where: str
    lines: list[str]

    @property
    def place(self) -> str:
        """Where they go, as it follows a sentence: "in train.py, before line 44: optimizer.step()"."""
        return self.where if self.where.startswith(("where ", "once, ")) else f"in {self.where}"


@dataclass(frozen=True)
class _Framework:
    """What a trainer that calls `backward` itself is told: a fixed limit, one that adapts, the learning rate."""

    limit: str
    auto: list[str]
    rate: tuple[str, str]


def _callback(package: str) -> list[str]:
    return [
        f"from gradrein.integrations.{package} import MonitorCallback",
        'Trainer(..., callbacks=[MonitorCallback("run.jsonl", clip="auto")])',
    ]


_TRAINER = "where the trainer is configured"
_LIGHTNING = _Framework(
    "Trainer(..., gradient_clip_val={:g})", _callback("lightning"), ("configure_optimizers", "{0}(..., lr={1:g})")
)
_FRAMEWORKS = {
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": _Framework(
        "TrainingArguments(..., max_grad_norm={:g})",
        [*_callback("transformers"), "TrainingArguments(..., max_grad_norm=0)"],
        (_TRAINER, "TrainingArguments(..., learning_rate={1:g})"),
    ),
}


def paste_clip(run: Run, limit: float) -> Paste:
    """Return the lines that clip at a fixed norm."""
    library, step = _library(run), site_of(run, "step")
    if library in _FRAMEWORKS:
        return Paste(_TRAINER, [_FRAMEWORKS[library].limit.format(limit)])
    if library or step is None or not _is_plain_step(step["text"]):
        return _paste_clipper(run, f"gradrein.by_norm({limit:g})")
    # Gradients are complete, and the model has its name, where the script steps: after a backward pass neither is sure.
    names = names_at(step)
    groups = f"{names.get('optimizer', 'optimizer')}.param_groups"
    target = f"{names['model']}.parameters()" if "model" in names else f'[p for g in {groups} for p in g["params"]]'
    line = " " * step["indent"] + f"torch.nn.utils.clip_grad_norm_({target}, {limit:g})"
    return Paste(f"{_file(run)}before line {step['line']}: {step['text']}", [line])


def paste_auto(run: Run) -> Paste:
    """Return the lines that clip with `auto`; of several optimizers all, as `--clip auto` does."""
    library, names = _library(run), _all_names(run)
    if library in _FRAMEWORKS:
        return Paste(_TRAINER, _FRAMEWORKS[library].auto)
    if len(names) < 2:
        return _paste_clipper(run, _AUTO)
    line = f"clippers = [gradrein.Clipper(one, {_AUTO}, {_SKIP}) for one in ({', '.join(names)})]"
    return _after_all(run, [_IMPORT, line])


def paste_rate(run: Run, rate: float) -> Paste:
    """Return the lines that set the learning rate."""
    library, made = _library(run), site_of(run, "made")
    if library in _FRAMEWORKS:
        where, line = _FRAMEWORKS[library].rate
        return Paste(where, [line.format(run.optimizer, rate)])
    changed = None if made is None else _with_rate(made["text"], rate)
    if made is None or changed is None:
        return Paste(f"{_file(run)}where the optimizer is made", [f"{run.optimizer}(..., lr={rate:g})"])
    return Paste(f"{_file(run)}in place of {_lines(made)}", [" " * made["indent"] + changed])


def paste_rates(run: Run, by: float) -> Paste | None:
    """Return the lines that divide the learning rates of all optimizers; None where their names are not known."""
    names = _all_names(run)
    if not names:
        return None
    groups = f"[group for one in ({', '.join(names)}) for group in one.param_groups]"
    return _after_all(run, [f"for group in {groups}:", f'    group["lr"] /= {by:g}'])


def paste_rate_and_auto(run: Run, rate: float) -> Paste:
    """Return the lines that set the learning rate and clip with `auto`."""
    slow, clip = paste_rate(run, rate), paste_auto(run)
    if "in place of" in slow.where or slow.where == clip.where:
        return Paste(slow.where, [*slow.lines, *clip.lines])
    then = "once after it" if slow.where.endswith("is made") else clip.place
    return Paste(f"{slow.where}, and {then}", [*slow.lines, *clip.lines])


def _paste_clipper(run: Run, policy: str) -> Paste:
    """Return lines that are right whatever the loop looks like: closures, scalers, several backward passes."""
    lines = [_IMPORT, f"clipper = gradrein.Clipper({_optimizer(run)}, {policy}, {_SKIP})"]
    made = site_of(run, "made")
    if made is None:
        return Paste(f"{_file(run)}once, after the optimizer is made and before the training loop", lines)
    return _after(run, made, lines)


def _after_all(run: Run, lines: list[str]) -> Paste:
    made = sites_of(run, "made")
    if len(made) < run.n_optimizers or len({(m["file"], m["indent"]) for m in made}) > 1:
        return Paste(f"{_file(run)}once, after the optimizers are made and before the training loop", lines)
    return _after(run, max(made, key=lambda m: m["line"]), lines)


def _after(run: Run, made: Site, lines: list[str]) -> Paste:
    return Paste(f"{_file(run)}after {_lines(made)}", [" " * made["indent"] + line for line in lines])


def _lines(made: Site) -> str:
    """Return the lines of a statement in words, with what it says."""
    first, last = made["line"], made.get("end")
    where = f"lines {first} to {last}" if isinstance(last, int) and last > first else f"line {first}"
    return f"{where}: {made['text']}"


def _with_rate(text: str, rate: float) -> str | None:
    """Return the statement that makes an optimizer with another learning rate; None where it does not set one."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # cut off, or no Python at all
        return None
    rates = [k for node in ast.walk(tree) if isinstance(node, ast.Call) for k in node.keywords if k.arg == "lr"]
    if len(rates) != 1:
        return None
    rates[0].value = ast.Constant(rate)
    return ast.unparse(tree)


def _is_plain_step(text: str) -> bool:
    """Return whether a line of the script is the statement `optimizer.step()` and nothing else."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):  # a part of a statement, or cut off
        return False
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    is_step = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    return is_step and isinstance(call, ast.Call) and not call.args and not call.keywords


def _library(run: Run) -> str:
    return library_of(site_of(run, "backward")) or library_of(site_of(run, "step"))


def _file(run: Run) -> str:
    site = site_of(run, "made") or site_of(run, "step")
    return f"{os.path.basename(site['file'])}, " if site is not None and not library_of(site) else ""


def _optimizer(run: Run) -> str:
    names = {**names_at(site_of(run, "step")), **names_at(site_of(run, "made"))}
    return names.get("optimizer", "optimizer")


def _all_names(run: Run) -> list[str]:
    """Return the names of all optimizers where they are made, else where they step; nothing where two are alike."""
    made = [names_at(site).get("optimizer", "") for site in sites_of(run, "made")]
    return made if len({*made} - {""}) == run.n_optimizers else optimizer_names(run)
