"""Recommend what to change from a record: what helped random runs like this one, the best first."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..._notebook import bars, card, table
from ..run.run import Run
from .actions import AUTO, Action, action_for
from .calibrated import ADVICE
from .finding import Finding
from .losses import judged_loss, still_falls
from .signs import (
    ADAPTIVE,
    LARGEST,
    LONGEST,
    SHORT,
    SHRINK,
    SUM,
    TEST_HEIGHT,
    follows_advice,
    is_clipped,
    measure,
    score_of,
)
from .statistics import finite, quantile

_CAUSES = "The causes that were found are what to change: this run is clipped already."
_TRY_THEM = "measure which of some changes is best, as this record cannot tell"
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
LOST = ("nonfinite", "diverged")
SYMPTOMS = (*LOST, "unsettled")
TRY = "--try"
_MEASURE = "One record cannot tell which change is best: `gradrein watch --try` measures them."
_NOT_FINITE = 9.0  # the sum of a run that is not finite, as in `benchmarks/random_runs/calibrate.py`
_GROUPS = {"adaptive": "an optimizer like Adam", "plain": "SGD", "plain, not finite": "SGD that breaks down"}
_WORDS: dict[str, Callable[[float, str], str]] = {
    LONGEST: lambda v, more: f"a longest step of {more} than {10**v * SHORT:.0%} of the weights",
    SHRINK: lambda v, more: f"gradients that end {more} than {math.exp(v):.2g} times smaller",
    LARGEST: lambda v, more: f"a largest gradient of {more} than {math.exp(v):.2g} times the median",
    TEST_HEIGHT: lambda v, more: f"a test loss {more} than {math.exp(v):.2g} times its lowest so far, on average",
    SUM: lambda v, more: f"signs that add up to {more} than {v:.2g} over the limit",
}


@dataclass(frozen=True)
class Advice:
    """Recommended changes.

    Attributes:
        because: Why.
        quantiles: The distribution of the norms before any clipping.
        actions: What to change, the best first.
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

    because: str
    quantiles: dict[str, float]
    actions: list[Action] = field(default_factory=list)
    optimizer: str | None = None

    def _repr_html_(self) -> str:
        changes = {f"{i}. {action.do}": action.why for i, action in enumerate(self.actions, 1)}
        return card(self.because, table(changes) + bars(self.quantiles))

    @property
    def policy(self) -> str | None:
        """`"auto"`, as for `--clip` and `Monitor(clip=...)`, if it is recommended; else None."""
        return "auto" if any(AUTO in action.try_with for action in self.actions) else None

    @property
    def threshold(self) -> float | None:
        """The norm to clip at, if a fixed one is among the changes; else None."""
        options = (action.try_with.split() for action in self.actions)
        fixed = (words[1] for words in options if words[:1] == ["--clip"] and words[1] != "auto")
        return next(map(float, fixed), None)


def advise(run: Run, findings: list[Finding]) -> Advice:
    """Recommend changes for a run with these findings."""
    norms, names = finite(run.norm), {finding.name for finding in findings}
    levels = {f"{q:.0%}": quantile(norms, q) for q in _QUANTILES} | {"largest": max(norms)} if norms else {}
    if any("origin" in finding.evidence for finding in findings):
        return Advice("The operation that makes the first NaN is known: change that.", levels)
    if names.isdisjoint(SYMPTOMS):
        return Advice(_why_nothing(run), levels)
    if "clip_decay" in names:
        return Advice(_CAUSES, levels)
    like, changes = leaf_of(run, not names.isdisjoint(LOST))
    actions: dict[str, Action] = {}
    for way, helped, needed, harmed, spoken in changes:
        why = f"Helped in {_share(helped, needed)} of {needed} random runs like this, harmed {harmed} of {spoken}."
        action = Action(_TRY_THEM, why, TRY) if way == "try" else action_for(run, way, why)
        if action is not None:
            actions.setdefault(action.try_with, action)
    if actions.keys() <= {TRY}:
        return Advice(_CAUSES, levels)
    return Advice(f"Like this: {like}. {_MEASURE}", levels, list(actions.values()))


def leaf_of(run: Run, lost: bool) -> tuple[str, list[tuple[str, int, int, int, int]]]:
    """Return which random runs are like this one, in words, and what helped them."""
    group = "adaptive" if run.optimizer in ADAPTIVE else "plain, not finite" if lost else "plain"
    values = {**measure(run), SUM: _NOT_FINITE if lost else score_of(run)}
    for path, changes in ADVICE[group]:
        if all((values.get(name, -1.0) > limit) == (side > 0) for name, side, limit in path):
            words = [_WORDS[name](limit, "more" if side > 0 else "not more") for name, side, limit in path]
            return ", ".join([_GROUPS[group], *words]), changes
    return _GROUPS[group], ADVICE[group][-1][1]


def _share(part: int, of: int) -> str:
    return f"{part / of:.0%}" if of else "none"


def _why_nothing(run: Run) -> str:
    if still_falls(judged_loss(run)):
        return (
            "The loss still falls at the end: train longer, or raise the learning rate while it stays steady. Of "
            "random runs that still fell, most ended lower either way."
        )
    if follows_advice(run):
        how = "is clipped" if is_clipped(run) else "has another learning rate"
        return (
            f"This run {how} already. Of random runs that were changed like this, few would have ended better still. "
            f"Whether it is better than before: `gradrein report BEFORE {run.path.name}`."
        )
    if not any(n > 0 for n in finite(run.norm)):
        return "The gradients are zero: there is nothing to clip."
    return "Of random runs like this, few would have ended better with another threshold or learning rate."
