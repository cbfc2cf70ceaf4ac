"""The changes that can be advised: each in words, as lines for the script, and as options that try it."""

from dataclasses import dataclass, field
from fractions import Fraction
from statistics import median

from ..run.run import Run
from .divergence import healthy_norms
from .signs import is_clipped
from .snippets import clipper_lines, rate_lines
from .statistics import finite

AUTO = "--clip auto"
_LEAST_HEALTHY = 8  # steps before a divergence that a threshold can be taken from


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


def action_for(run: Run, way: str, why: str) -> Action | None:
    """Return a way of `calibrated.py`, such as "auto, lr 1/3" or "clip 1/10", as a change of this run.

    None where it is none: the run is clipped like that already, or there is nothing to take a number from.
    """
    parts = {kind: size for kind, _, size in (part.partition(" ") for part in way.split(", "))}
    clip, rate = _clip(run, parts), slower(run, float(Fraction(parts["lr"]))) if "lr" in parts else None
    if (clip is None and parts.keys() - {"lr"} and not _adapts(run)) or ("lr" in parts and rate is None):
        return None
    if clip is None and rate is None:
        return None
    where, lines = clipper_lines(run, clip) if clip is not None else ("", [])
    do = [f"clip gradients {'with `auto`' if clip == 'auto' else f'at a norm of {clip:g}'}"] if clip is not None else []
    options = [f"--clip {clip if clip == 'auto' else f'{clip:g}'}"] if clip is not None else []
    if rate is not None:
        at, line = rate_lines(run, rate) if run.n_optimizers == 1 else ("", [])
        if line and lines[:1] == ["import gradrein"]:  # not of a trainer, which is made elsewhere
            where, line[0], lines[0] = at, f"{line[0]}  # there", f"{lines[0]}  # and below it"
        where, lines = (where or at), [*line, *lines]
        scale = rate / max(finite(run.lr))
        do.append(f"lower the learning rate to {rate:g}" if run.n_optimizers == 1 else
                  f"divide every learning rate by {round_two(1 / scale):g}")  # fmt: skip
        options.append(f"--lr-scale {scale:.2g}")
    return Action(" and ".join(do), why, " ".join(options), where, lines)


def _clip(run: Run, parts: dict[str, str]) -> float | str | None:
    """Return what to clip by; None where nothing is, or the run is clipped as tightly already."""
    if _adapts(run):
        return None
    if "auto" in parts:
        return "auto"
    norms = healthy_norms(run)
    if "clip" not in parts or len(norms) < _LEAST_HEALTHY:
        return None
    limit = round_two(median(norms) * float(Fraction(parts["clip"])))
    return limit if 0 < limit < (run.threshold or float("inf")) else None


def _adapts(run: Run) -> bool:
    return is_clipped(run) and run.threshold is None


def slower(run: Run, by: float) -> float | None:
    """Return the learning rate times a factor; None where that of the run is not known."""
    rates = finite(run.lr)
    return round_two(max(rates) * by) if rates and max(rates) > 0 else None


def round_two(value: float) -> float:
    """Round to two digits: a threshold is not known better than that, and people have to type it."""
    return float(f"{value:.2g}")
