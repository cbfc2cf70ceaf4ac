"""The changes that can be advised: each in words, as lines for the script, and as options that try it."""

from dataclasses import dataclass, field

from ..run.run import Run
from .snippets import clipper_lines, rate_lines
from .statistics import finite

AUTO = "--clip auto"
_SLOWER = 3.0  # what the learning rate is divided by
_SLOWER_ADAPTIVE = 2.0  # beside `auto`, which holds the rest
# Optimizers that divide by the size of past gradients, or take only their sign: scaling all of them changes little.
_NAMES = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Adafactor Lion SparseAdam Muon LAMB"
ADAPTIVE = frozenset(_NAMES.split(" "))


@dataclass(frozen=True)
class Action:
    """One change.

    Attributes:
        do: What, in a clause: "lower the learning rate to 0.01".
        why: Why, in a sentence.
        try_with: The options of `gradrein watch` that try it without editing.
        where: Where it goes: "in train.py, below line 33: opt = SGD(...)". Empty if `do` says it.
        lines: What to write there.
    """

    do: str
    why: str
    try_with: str = ""
    where: str = ""
    lines: list[str] = field(default_factory=list)


def clip_auto(run: Run) -> Action:
    """Clip with a limit that adapts."""
    why = "It adapts the limit during training, and needs no threshold from you."
    return Action("clip gradients with `auto`", why, AUTO, *clipper_lines(run, "auto"))


def clip_at(run: Run, threshold: float) -> Action:
    """Clip at a fixed norm."""
    why = "A single step can then not move the weights far."
    do = f"clip gradients at a norm of {threshold:g}"
    return Action(do, why, f"--clip {threshold:g}", *clipper_lines(run, threshold))


def loosen_clip(run: Run, threshold: float, options: str) -> Action:
    """Clip less: at a higher threshold, or at this one in place of a limit that adapts."""
    do = f"clip at a norm of {threshold:g} instead of by an adaptive limit"
    if run.threshold is not None:
        do = f"raise the threshold from {run.threshold:g} to {threshold:g}, where gradients are clipped now"
    why = "Most steps are clipped to one length; at this threshold 90% of the gradients of this run stay unclipped."
    return Action(do, why, options)


def slower(run: Run, by: float | None = None) -> float | None:
    """Return a lower learning rate; None where that of the run is not known."""
    by = by or (_SLOWER_ADAPTIVE if run.optimizer in ADAPTIVE else _SLOWER)
    rates = finite(run.lr)
    return round_two(max(rates) / by) if rates and max(rates) > 0 else None


def slow_down(run: Run, rate: float | None) -> list[Action]:
    """Lower the learning rate; for Adam and its kin, also let it forget sooner."""
    if rate is None:
        return []
    actions = [_lower_rate(run, rate)]
    betas = run.settings.get("betas")
    if run.optimizer in ADAPTIVE and isinstance(betas, list) and len(betas) == 2 and 0.95 < betas[1] < 1:
        steps = f"{1 / (1 - betas[1]):.0f}"
        why = f"With {betas[1]:g} the optimizer needs {steps} steps to notice that gradients have grown."
        actions.append(Action(f"set betas=({betas[0]:g}, 0.95)", why))
    return actions


def _lower_rate(run: Run, rate: float) -> Action:
    """Lower the learning rate; of several optimizers every one, as `--lr-scale` does."""
    if run.n_optimizers == 1:
        why = "This shortens every step, whatever the gradients are."
        return Action(f"lower the learning rate to {rate:g}", why, _scale(run, rate), *rate_lines(run, rate))
    by = round_two(max(finite(run.lr)) / rate)
    why = "This shortens every step, and the optimizers keep their balance."
    return Action(f"divide every learning rate by {by:g}", why, _scale(run, rate))


def slow_down_and_clip(run: Run, rate: float) -> Action:
    """Lower the learning rate, and clip with a limit that adapts."""
    where, lines = clipper_lines(run, "auto")
    return Action(
        f"lower the learning rate to {rate:g} and clip gradients with `auto`",
        "The learning rate makes every step shorter; `auto` limits those that still overshoot.",
        f"{AUTO} {_scale(run, rate)}",
        where,
        [*rate_lines(run, rate)[1], *lines],
    )


def round_two(value: float) -> float:
    """Round to two digits: a threshold is not known better than that, and people have to type it."""
    return float(f"{value:.2g}")


def _scale(run: Run, rate: float) -> str:
    return f"--lr-scale {rate / max(finite(run.lr)):.2g}"
