"""Recommend what to change from a record: clipping, a learning rate, the best first."""

import math
from dataclasses import dataclass, field
from statistics import median

from ..run.run import Run
from .actions import (
    ADAPTIVE,
    AUTO,
    Action,
    clip_at,
    clip_auto,
    loosen_clip,
    round_two,
    slow_down,
    slow_down_and_clip,
    slower,
)
from .calibrated import HELPED
from .divergence import divergence
from .finding import Finding
from .sites import label_of
from .statistics import finite, quantile

_LEAST = 30
_LEAST_MEASURED = 10  # runs that a measured chance is from
_LEAST_HEALTHY = 8  # steps before a divergence that a threshold can be taken from
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_OF_MEDIAN = 3.0  # what the median of healthy norms is divided by for a threshold
_FAR = 3.0  # a loss above so many times that at the start belongs to a run that has diverged
_AT_ONCE = 10.0  # what the learning rate of a run that breaks down at once is divided by
_WHY_ADAPTIVE = (
    "{} divides by the size of past gradients, so clipping alone shortens its steps only until the larger ones have "
    "left its averages; a lower learning rate shortens all of them."
)
_WHY_SEVERAL = (
    "A lower learning rate for {} alone would change its balance with the other optimizers; `auto` limits only the "
    "steps that overshoot."
)
SYMPTOMS = ("nonfinite", "oscillation", "rising", "unsettled")
_OUTLIERS = ("spikes", "heavy_tail", "cluster", "nonfinite")
LOST = ("nonfinite", "rising")
_TIGHT = ("clip_tight", "clip_decay")


@dataclass(frozen=True)
class Advice:
    """Recommended changes.

    Attributes:
        threshold: The norm to clip at, if a fixed one is recommended; None if no clipping is recommended.
        because: Why.
        quantiles: The distribution of the norms before any clipping.
        actions: What to change, the best first.
        learning_rate: The learning rate to try; None if it is not the problem.
        optimizer: Which optimizer, if the run has several. Set by the report.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with gradrein.Monitor(None, optimizer) as monitor:
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> monitor.report().advice.threshold is None
        True

    See Also:
        [`gradrein.watch.Report`][], [`gradrein.watch.Finding`][]
    """

    threshold: float | None
    because: str
    quantiles: dict[str, float]
    actions: list[Action] = field(default_factory=list)
    learning_rate: float | None = None
    optimizer: str | None = None

    @property
    def policy(self) -> str | None:
        """`"auto"`, as for `--clip` and `Monitor(clip=...)`, if it is recommended; else None."""
        return "auto" if any(AUTO in action.try_with for action in self.actions) else None


def advise(run: Run, findings: list[Finding]) -> Advice:
    """Recommend changes for a run with these findings."""
    norms, names = finite(run.norm), {finding.name for finding in findings}
    levels = {f"{q:.0%}": quantile(norms, q) for q in _QUANTILES} if norms else {}
    if any("origin" in finding.evidence for finding in findings):
        return Advice(None, "The operation that makes the first NaN is known: change that.", levels)
    if names & set(LOST) and min(len(norms) - _LEAST, len(_healthy_norms(run)) - _LEAST_HEALTHY) < 0:
        return _diverged_at_once(run, levels)
    if len(norms) < _LEAST:
        return Advice(None, f"{len(norms)} steps are too few to judge by; {_LEAST} are needed.", levels)
    levels["largest"] = max(norms)
    reasons = [finding.name for finding in findings if finding.clipping_helps]
    threshold = round_two(_threshold(run)) if reasons and not names & set(_TIGHT) else 0.0
    plain = Advice(None, _why_nothing(run, names), levels)
    if names & set(_TIGHT) or (names.isdisjoint(SYMPTOMS) and _is_clipped(run)):
        return _loosen(run, names, plain)
    if not reasons or threshold <= 0:
        return plain
    if _is_clipped(run) and "rising" in names and "oscillation" not in names and divergence(run) is None:
        return _not_by_clipping(run, plain)
    rate, is_adaptive = slower(run), run.optimizer in ADAPTIVE
    is_calm = names.isdisjoint((*SYMPTOMS, "edge_of_stability")) and not is_adaptive
    rest = [] if is_calm else slow_down(run, rate)
    first = _lead(run, rate)
    # Where nothing stands out of what Adam has seen, a fixed threshold would change next to nothing.
    acts = not (is_adaptive and names.isdisjoint(_OUTLIERS)) and (run.threshold or math.inf) > threshold
    fixed = [clip_at(run, threshold)] if acts else []
    cause = next((name for name in reasons if name not in SYMPTOMS), "")  # the weightiest comes first
    actions = [*first, *rest, *fixed] if is_adaptive or cause == "edge_of_stability" else [*first, *fixed, *rest]
    return Advice(threshold if acts else None, _why(run, reasons), levels, actions, rate if rest else None)


def _diverged_at_once(run: Run, levels: dict[str, float]) -> Advice:
    """Advise on a run that has no healthy part to learn from."""
    because = f"Healthy steps before it diverged: {len(_healthy_norms(run))}, too few to take a threshold from."
    rate = slower(run, _AT_ONCE)
    return Advice(None, because, levels, [*_lead(run, rate), *slow_down(run, rate)[:1]], rate)


def _not_by_clipping(run: Run, plain: Advice) -> Advice:
    """Advise on a run that is clipped, and whose loss rises steadily: no single step throws it off."""
    because = (
        "This run is already clipped, and its loss rises steadily. The cause is not a single long step, so a tighter "
        "limit will not stop it."
    )
    rate, decay = slower(run), run.settings.get("weight_decay")
    actions = slow_down(run, rate)
    if isinstance(decay, (int, float)) and decay > 0:
        why = "Weight decay is not clipped: it may pull the weights back harder than the clipped gradient moves them."
        actions = [*actions, Action(f"lower weight_decay from {decay:g}, or set it to 0", why)]
    return Advice(None, because, plain.quantiles, actions, rate)


def _lead(run: Run, rate: float | None) -> list[Action]:
    """Return what comes first: a limit that adapts, and for Adam and its kin this lower learning rate with it."""
    if _is_clipped(run) and run.threshold is None:  # it adapts already
        return []
    # Of several optimizers one that becomes slower alone would change their balance.
    together = run.optimizer in ADAPTIVE and run.n_optimizers == 1
    return [slow_down_and_clip(run, rate) if together and rate is not None else clip_auto(run)]


def _loosen(run: Run, names: set[str], plain: Advice) -> Advice:
    """Advise on a run whose clipping is the trouble, or is not."""
    if names.isdisjoint(_TIGHT):
        return plain
    higher = round_two(quantile(finite(run.norm), 0.9))
    # A second limit beside that of the script would change nothing.
    options = f"--clip {higher:g}" if run.header.get("clip") is not None else ""
    rate = slower(run)
    actions = [*_decay_less(run, names), loosen_clip(run, higher, options)]
    slow = slow_down(run, rate) if not names.isdisjoint(SYMPTOMS) else []
    because = "This run is clipped so tightly that the threshold has become its learning rate."
    return Advice(None, because, plain.quantiles, [*actions, *slow], rate if slow else None)


def _decay_less(run: Run, names: set[str]) -> list[Action]:
    """Return weight decay that fits the limit of a policy that adapts, which is to be kept."""
    decay = run.settings.get("weight_decay")
    if run.threshold is not None or "clip_decay" not in names or not isinstance(decay, (int, float)):
        return []
    lower = round_two(decay * median(finite(run.clip)[-200:]))
    return [Action(f"lower weight_decay from {decay:g} to {lower:g}", "Clipping shortens the gradient, not the decay.")]


def _is_clipped(run: Run) -> bool:
    return any(f < 1 for f in finite(run.clip))


def _why_nothing(run: Run, names: set[str]) -> str:
    held = finite(run.clip)
    rate = sum(1 for f in held if f < 1) / len(held) if held else 0.0
    if rate and names.isdisjoint(SYMPTOMS):
        return f"This run was already clipped ({rate:.0%} of the steps) and does not swing. Keep it as it is."
    if not any(n > 0 for n in finite(run.norm)):
        return "The gradients are zero: there is nothing to clip."
    return "Nothing in this run calls for clipping."


def _why(run: Run, reasons: list[str]) -> str:
    first = f"Found: {', '.join(reasons)}. "
    if run.optimizer in ADAPTIVE:
        alone = run.n_optimizers == 1
        return first + (_WHY_ADAPTIVE.format(run.optimizer) if alone else _WHY_SEVERAL.format(label_of(run)))
    if _is_clipped(run):
        return f"{first}It is already clipped, and that does not stabilise it."
    return (
        f"{first}`auto` comes first: its limit adapts during the run, and a number from one run does not. "
        "The threshold is a third of the median gradient norm, from the part of the run before anything diverged: "
        f"the few large gradients that it should limit do not move it.{_measured(run)}"
    )


def _measured(run: Run) -> str:
    """Return how often `auto` helped runs like this one that needed help, where enough of them were measured."""
    group = f"plain, {'not finite' if run.nonfinite else 'finite'}"
    helped, of = next((helped, of) for way, helped, of in HELPED[group] if way == "auto")
    like = f"of {of} random runs like this that needed help it ended {helped / of:.0%} at least a third lower"
    return f" Measured: {like}." if of >= _LEAST_MEASURED else ""


def _threshold(run: Run) -> float:
    """Return a norm somewhat below what is usual in this run before it diverged; for Adam and its kin the usual one."""
    norms = _healthy_norms(run)
    if len(norms) < _LEAST_HEALTHY:
        return 0.0
    return quantile(norms, 0.5) / (1.0 if run.optimizer in ADAPTIVE else _OF_MEDIAN)


def _healthy_norms(run: Run) -> list[float]:
    """Return the norms before the run diverged, where it did."""
    known, lost = finite(run.loss), divergence(run)
    start = min(median(known[:5]), median(known[:20])) if known else math.nan
    bad = {event.step for event in run.nonfinite}
    end = next((i for i, step in enumerate(run.steps) if step in bad), len(run.steps))
    end = end if lost is None else min(end, lost.at)
    rows = zip(run.norm[:end], run.loss[:end], strict=True)
    return [n for n, v in rows if math.isfinite(n) and n > 0 and not (start > 0 and v > _FAR * start)]
