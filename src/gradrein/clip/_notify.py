"""Notify subscribers of what the clipping functions of this package did."""

from typing import Any

from torch import Tensor

from .._events import ClipEvent, describe_norm, describe_value, notify_clip
from ..policies import Scale
from ._parameters import named
from ._report import ClipReport, Outcome


def _parameters(target: Any) -> list[Tensor]:
    return named(target)[1]


def _describe_policy(arguments: dict[str, Any], report: ClipReport) -> ClipEvent | None:
    """Describe a call of `clip_`."""
    if report.dry_run:
        return None
    outcomes = report._outcomes
    single = all(map(_has_one_factor, outcomes))
    max_norm = getattr(arguments["policy"], "max_norm", None)
    return ClipEvent(
        max_norm if single and isinstance(max_norm, float) else None,
        lambda: report.norm if {outcome.p for outcome in outcomes} == {2.0} else None,
        lambda: 0.0 if report.skipped else report.coefficient if single and len(outcomes) == 1 else None,
    )


def _has_one_factor(outcome: Outcome) -> bool:
    decision = outcome.decision
    return isinstance(decision, Scale) and isinstance(decision.by, Tensor) and decision.by.dim() == 0


notify_clip_norm = notify_clip(_parameters, describe_norm)
notify_clip_value = notify_clip(_parameters, describe_value)
notify_clip_policy = notify_clip(_parameters, _describe_policy)
