"""Recommend clipping from a record, and say what it would have changed."""

from dataclasses import dataclass
from statistics import median

from ..run.run import Run
from .finding import Finding
from .statistics import finite, quantile

_LEAST = 30
# Steps below the threshold make this share of the sum of all norms.
_CALM_SHARE = 0.25
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


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
class Advice:
    """Recommended clipping.

    Attributes:
        threshold: The norm to clip at, where a fixed one is wanted; None where no clipping is advised.
        because: Why.
        effect: What it would have changed on this run.
        quantiles: The distribution of the norms before any clipping.
        candidates: What other thresholds would have done.
    """

    threshold: float | None
    because: str
    effect: Candidate | None
    quantiles: dict[str, float]
    candidates: list[Candidate]

    @property
    def policy(self) -> str | None:
        """What to clip with, as for `--clip` and `Monitor(clip=...)`; None where no clipping is advised."""
        return None if self.threshold is None else "auto"


def advise(run: Run, findings: list[Finding]) -> Advice:
    """Recommend clipping for a run with these findings."""
    norms = finite(run.norm)
    levels = {f"{q:.0%}": quantile(norms, q) for q in _QUANTILES} if norms else {}
    if len(norms) < _LEAST:
        return Advice(None, f"{len(norms)} steps are too few to judge by; {_LEAST} are needed.", None, levels, [])
    levels["largest"] = max(norms)
    thresholds = {_round(v) for v in levels.values() if v > 0} | {_round(_calm(norms))} - {0.0}
    candidates = [_candidate(norms, t) for t in sorted(thresholds)]
    reasons = [finding.name for finding in findings if finding.clipping_helps]
    if not reasons:
        return Advice(None, "Nothing in this run calls for clipping.", None, levels, candidates)
    held = finite(run.clip)
    if "oscillation" not in reasons and any(f < 1 for f in held):
        rate = sum(1 for f in held if f < 1) / len(held)
        because = f"This run was clipped already ({rate:.0%} of the steps) and does not swing. Keep it as it is."
        return Advice(None, because, None, levels, candidates)
    threshold = _round(_calm(norms))
    if threshold <= 0:
        return Advice(None, "The gradients are zero: there is nothing to clip.", None, levels, candidates)
    because = (
        f"Found: {', '.join(reasons)}. The norms of a run that swings are swollen by the swinging, so the threshold "
        f"comes from their calm part: steps below it make {_CALM_SHARE:.0%} of the sum of all norms. `auto` needs no "
        "threshold: its limit shrinks when steps go too far and grows while they do not."
    )
    return Advice(threshold, because, _candidate(norms, threshold), levels, candidates)


def _calm(norms: list[float]) -> float:
    """Return the norm below which steps make `_CALM_SHARE` of the sum: norms near zero weigh nothing."""
    ordered, so_far, total = sorted(norms), 0.0, sum(norms)
    for norm in ordered:
        so_far += norm
        if so_far >= _CALM_SHARE * total:
            return norm
    return ordered[-1]


def _candidate(norms: list[float], threshold: float) -> Candidate:
    above = [n for n in norms if n > threshold]
    removed = sum(n - threshold for n in above) / sum(norms) if above else 0.0
    return Candidate(
        threshold, len(above) / len(norms), removed, median(threshold / n for n in above) if above else 1.0
    )


def _round(value: float) -> float:
    """Round to two digits: a threshold is not known better than that, and people have to type it."""
    return float(f"{value:.2g}")
