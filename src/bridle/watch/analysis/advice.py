"""Recommend what to change from a record: a threshold, a learning rate, and what each would have done."""

import math
from dataclasses import dataclass, field
from statistics import median

from ..run.run import Run
from .divergence import divergence
from .finding import Finding
from .paste import Paste, paste_auto, paste_clip, paste_rate
from .statistics import finite, quantile

_LEAST = 30
_LEAST_HEALTHY = 8  # steps before a divergence that a threshold can be taken from
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_LOW = 0.1  # the quantile of healthy norms that a threshold is
_OF_MEDIAN = 0.1  # and what part of their median it is at least
_FAR = 3.0  # a loss above so many times that at the start belongs to a run that has diverged
_SLOWER = 3.0  # what the learning rate is divided by
# Optimizers that divide by the size of past gradients, or take only their sign: scaling all of them changes little.
_NAMES = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Adafactor Lion SparseAdam Muon LAMB"
ADAPTIVE = frozenset(_NAMES.split(" "))
SYMPTOMS = ("nonfinite", "oscillation", "rising")
_OUTLIERS = ("spikes", "heavy_tail", "cluster", "nonfinite")
LOST = ("nonfinite", "rising")
_TIGHT = ("clip_tight", "clip_decay")
_AUTO = "--clip auto"


@dataclass(frozen=True)
class Candidate:
    """What a threshold would have done on this run.

    Attributes:
        threshold: The largest norm allowed.
        clipped: Share of the steps it would have changed.
        removed: Share of the sum of all norms it would have removed.
        factor: The median factor of the steps it would have changed; 1 if none.
    """

    threshold: float
    clipped: float
    removed: float
    factor: float


@dataclass(frozen=True)
class Action:
    """One change.

    Attributes:
        do: What, in a clause: "lower the learning rate to 0.01".
        why: Why, in a sentence.
        paste: The lines, and where they go.
        try_with: The options of `bridle watch` that try it without editing.
    """

    do: str
    why: str
    paste: Paste | None = None
    try_with: str = ""


@dataclass(frozen=True)
class Advice:
    """Recommended changes.

    Attributes:
        threshold: The norm to clip at, where a fixed one is wanted; None where no clipping is advised.
        because: Why.
        effect: What it would have changed on this run.
        quantiles: The distribution of the norms before any clipping.
        candidates: What other thresholds would have done.
        actions: What to change, the best first.
        learning_rate: The learning rate to try; None where it is not the matter.
        optimizer: Which optimizer, where the run has several. Set by the report.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with bridle.Monitor(None, optimizer) as monitor:
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> monitor.report().advice.threshold is None
        True

    See Also:
        [`bridle.watch.Report`][], [`bridle.watch.Finding`][]
    """

    threshold: float | None
    because: str
    effect: Candidate | None
    quantiles: dict[str, float]
    candidates: list[Candidate]
    actions: list[Action] = field(default_factory=list)
    learning_rate: float | None = None
    optimizer: str | None = None

    @property
    def policy(self) -> str | None:
        """What to clip with, as for `--clip` and `Monitor(clip=...)`; None where no clipping is advised."""
        return None if self.threshold is None else "auto"


def advise(run: Run, findings: list[Finding]) -> Advice:
    """Recommend changes for a run with these findings."""
    norms, names = finite(run.norm), {finding.name for finding in findings}
    levels = {f"{q:.0%}": quantile(norms, q) for q in _QUANTILES} if norms else {}
    if names & set(LOST) and min(len(norms) - _LEAST, len(_healthy_norms(run)) - _LEAST_HEALTHY) < 0:
        return _diverged_at_once(run, levels)
    if len(norms) < _LEAST:
        return Advice(None, f"{len(norms)} steps are too few to judge by; {_LEAST} are needed.", None, levels, [])
    levels["largest"] = max(norms)
    reasons = [finding.name for finding in findings if finding.clipping_helps]
    threshold = _round(_threshold(run)) if reasons and not names & set(_TIGHT) else 0.0
    thresholds = {_round(v) for v in levels.values() if v > 0} | {threshold} - {0.0}
    candidates = [_candidate(norms, t) for t in sorted(thresholds)]
    plain = Advice(None, _why_nothing(run, names), None, levels, candidates)
    if names & set(_TIGHT) or (names.isdisjoint(SYMPTOMS) and _is_clipped(run)):
        return _loosen(run, names, plain)
    if not reasons or threshold <= 0:
        return plain
    if _is_clipped(run) and "rising" in names and "oscillation" not in names and divergence(run) is None:
        return _not_by_clipping(run, plain)
    rate = _slower(run)
    is_calm = names.isdisjoint((*SYMPTOMS, "edge_of_stability")) and run.optimizer not in ADAPTIVE
    slower = [] if is_calm else _slow_down(run, rate)
    clip = [action for action in _clip(run, threshold) if not _is_done(run, action, threshold)]
    cause = next((name for name in reasons if name not in SYMPTOMS), "")  # the weightiest comes first
    leads = run.optimizer in ADAPTIVE or cause == "edge_of_stability"
    if run.optimizer in ADAPTIVE and names.isdisjoint(_OUTLIERS):  # clipping would change next to nothing
        return Advice(None, _why_adaptive(run), None, levels, candidates, slower, rate)
    actions = [*slower, *clip] if leads else [*clip, *slower]
    is_new = any(action.try_with != _AUTO for action in clip)
    limit, effect = (threshold, _candidate(norms, threshold)) if is_new else (None, None)
    return Advice(limit, _why(run, reasons), effect, levels, candidates, actions, rate if slower else None)


def _diverged_at_once(run: Run, levels: dict[str, float]) -> Advice:
    """Advise on a run that has no healthy part to learn from: nothing but smaller steps will do."""
    because = f"Healthy steps before it diverged: {len(_healthy_norms(run))}, too few to take a threshold from."
    rate = _slower(run, 10)
    auto = [] if run.optimizer in ADAPTIVE else _clip(run, 1.0)[:1]
    actions = [*(_slow_down(run, rate)[:1] if rate else []), *auto]
    return Advice(None, because, None, levels, [], actions, rate)


def _not_by_clipping(run: Run, plain: Advice) -> Advice:
    """Advise on a run that is clipped, and whose loss rises steadily: no single step throws it off."""
    because = (
        "This run is clipped already, and its loss rises steadily: that is no single long step, so a tighter limit "
        "will not stop it."
    )
    rate, decay = _slower(run), run.settings.get("weight_decay")
    actions = _slow_down(run, rate)
    if isinstance(decay, (int, float)) and decay > 0:
        why = "Weight decay is not clipped: where the gradient is, it may pull the weights back harder than that."
        actions = [*actions, Action(f"lower weight_decay from {decay:g}, or set it to 0", why)]
    return Advice(None, because, None, plain.quantiles, plain.candidates, actions, rate)


def _is_done(run: Run, action: Action, threshold: float) -> bool:
    """Return whether a run is clipped like that already: with a limit that adapts, or at a threshold as low."""
    if not _is_clipped(run):
        return False
    return run.threshold is None if action.try_with == _AUTO else (run.threshold or math.inf) <= threshold


def _loosen(run: Run, names: set[str], plain: Advice) -> Advice:
    """Advise on a run whose clipping is the trouble, or is not."""
    if names.isdisjoint(_TIGHT):
        return plain
    higher = _round(quantile(finite(run.norm), 0.9))
    now = "" if run.threshold is None else f" from {run.threshold:g}"
    raised = Action(
        f"raise the threshold{now} to {higher:g}, where gradients are clipped now",
        "Most steps are cut down to one length; at this threshold 90% of the gradients of this run would be left as "
        "they are.",
        # A second limit beside that of the script would change nothing.
        try_with=f"--clip {higher:g}" if run.header.get("clip") is not None else "",
    )
    rate = _slower(run)
    actions = [raised, *(_slow_down(run, rate) if not names.isdisjoint(SYMPTOMS) else [])]
    because = "This run is clipped so tightly that the threshold has become its learning rate."
    return Advice(None, because, None, plain.quantiles, plain.candidates, actions, rate if len(actions) > 1 else None)


def _is_clipped(run: Run) -> bool:
    return any(f < 1 for f in finite(run.clip))


def _why_nothing(run: Run, names: set[str]) -> str:
    held = finite(run.clip)
    rate = sum(1 for f in held if f < 1) / len(held) if held else 0.0
    if rate and names.isdisjoint(SYMPTOMS):
        return f"This run was clipped already ({rate:.0%} of the steps) and does not swing. Keep it as it is."
    if not any(n > 0 for n in finite(run.norm)):
        return "The gradients are zero: there is nothing to clip."
    return "Nothing in this run calls for clipping."


def _why(run: Run, reasons: list[str]) -> str:
    first = f"Found: {', '.join(reasons)}. "
    if run.optimizer in ADAPTIVE:
        return first + _why_adaptive(run)
    if _is_clipped(run):
        return f"{first}It is clipped already, and that does not hold it."
    return (
        f"{first}The threshold is what the smallest tenth of the gradients stay below, from the part of the run before "
        "anything diverged: large gradients, which it is to limit, do not move it. `auto` needs none: its limit "
        "shrinks when steps lead nowhere and grows while they get on."
    )


def _why_adaptive(run: Run) -> str:
    return (
        f"{run.optimizer} divides by the size of past gradients, so a smaller gradient makes no smaller step: the "
        "learning rate, a warm-up and betas come first. Clipping acts only on the few steps that stand out."
    )


def _threshold(run: Run) -> float:
    """Return a norm that healthy steps of this run stay near: of the steps before it diverged, a low quantile."""
    norms = _healthy_norms(run)
    if len(norms) < _LEAST_HEALTHY:
        return 0.0
    middle = quantile(norms, 0.5)
    if run.optimizer in ADAPTIVE:  # what is usual is free, and the rest stands out
        return middle
    return max(quantile(norms, _LOW), _OF_MEDIAN * middle)


def _healthy_norms(run: Run) -> list[float]:
    """Return the norms before the run diverged, where it did."""
    known, lost = finite(run.loss), divergence(run)
    start = min(median(known[:5]), median(known[:20])) if known else math.nan
    bad = {event.step for event in run.nonfinite}
    end = next((i for i, step in enumerate(run.steps) if step in bad), len(run.steps))
    end = end if lost is None else min(end, lost.at)
    rows = zip(run.norm[:end], run.loss[:end], strict=True)
    return [n for n, v in rows if math.isfinite(n) and n > 0 and not (start > 0 and v > _FAR * start)]


def _slower(run: Run, by: float = _SLOWER) -> float | None:
    rates = finite(run.lr)
    return _round(max(rates) / by) if rates and max(rates) > 0 else None


def _slow_down(run: Run, rate: float | None) -> list[Action]:
    if rate is None:
        return []
    why = "Every step becomes shorter by that, whatever the gradients are."
    scale = f"--lr-scale {rate / max(finite(run.lr)):.2g}"
    found = [Action(f"lower the learning rate to {rate:g}", why, paste_rate(run, rate), scale)]
    betas = run.settings.get("betas")
    if run.optimizer in ADAPTIVE and isinstance(betas, list) and len(betas) == 2 and betas[1] > 0.95:
        why = (
            f"With {betas[1]:g} the optimizer needs {1 / (1 - betas[1]):.0f} steps to notice that gradients have grown."
        )
        found.append(Action(f"set betas=({betas[0]:g}, 0.95)", why))
    return found


def _clip(run: Run, threshold: float) -> list[Action]:
    fixed = Action(
        f"clip gradients at a norm of {threshold:g}",
        "One step can then not throw the weights far.",
        paste_clip(run, threshold),
        f"--clip {threshold:g}",
    )
    if run.optimizer in ADAPTIVE:
        return [fixed]
    why = "It finds the limit while it trains, and needs no number from you."
    return [Action("clip gradients with `auto`", why, paste_auto(run), _AUTO), fixed]


def _candidate(norms: list[float], threshold: float) -> Candidate:
    above = [n for n in norms if n > threshold]
    removed = sum(n - threshold for n in above) / sum(norms) if above else 0.0
    return Candidate(
        threshold, len(above) / len(norms), removed, median(threshold / n for n in above) if above else 1.0
    )


def _round(value: float) -> float:
    """Round to two digits: a threshold is not known better than that, and people have to type it."""
    return float(f"{value:.2g}")
