"""Named findings: one file each, and one entry in a table below.

Each file has one function from a run to a finding, or to None where its criterion is not met. Whether a run is spoken
of at all is decided by its symptoms; of these `unsettled` is a rule that is fitted to random training runs.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from ....errors import ArgumentError
from ...run.run import Run
from ..finding import Finding
from .clip_decay import clip_decay
from .clip_scale import clip_scale
from .dead import dead
from .depth import depth
from .diverged import diverged
from .edge_of_stability import edge_of_stability
from .loss_power import loss_power
from .noise_scale import noise_scale
from .nonfinite import nonfinite
from .outliers import outliers
from .overfitting import overfitting
from .precision import precision
from .rank_norms import rank_norms
from .sample_share import sample_share
from .unsettled import unsettled

__all__ = ["CAUSES", "FAULTS", "SYMPTOMS", "Check", "find", "register_finding"]

Check: TypeAlias = Callable[[Run], Finding | None]
C = TypeVar("C", bound=Check)

# What happened to the run as a whole
SYMPTOMS: tuple[Check, ...] = (nonfinite, diverged, unsettled)
# Likely causes of that: looked for only where there is a symptom
CAUSES: tuple[Check, ...] = (
    edge_of_stability,
    outliers,
    sample_share,
    loss_power,
    clip_decay,
    overfitting,
    noise_scale,
    depth,
)
# Faults of a script, a model or a machine, whatever the loss does
FAULTS: tuple[Check, ...] = (rank_norms, clip_scale, precision, dead)
_registered: list[Check] = []


def register_finding(check: C) -> C:
    """Apply your own check to every run that is reported in this process. Usable as a decorator.

    Args:
        check: A function from a `Run` to a `Finding`, or to None if its criterion is not met.

    Returns:
        The check.

    Raises:
        ArgumentError: (a ValueError) `check` is not callable, or is already registered.

    Examples:
        >>> @gradrein.watch.register_finding
        ... def huge(run):
        ...     size = sum(run.sizes)
        ...     if size > 1e12:
        ...         title = f"the model has {size:.3g} parameters"
        ...         return gradrein.watch.Finding("huge", title, 0.5, "above 1e12", {"size": size}, "Shard it.")

    See Also:
        [`gradrein.watch.Finding`][], [`gradrein.watch.Run`][]
    """
    if not callable(check):
        raise ArgumentError(f"a check is a function from a Run to a Finding or None; found {check!r}.")
    if check in _all():
        raise ArgumentError(f"the check {check!r} is registered already.")
    _registered.append(check)
    return check


def find(run: Run, failures: list[str] | None = None) -> list[Finding]:
    """Apply the checks, those for causes only where there is a symptom. What explains most comes first.

    Args:
        run: The run.
        failures: Where to put a sentence about a check that raises, so that the others are still reported. None: let
            it raise.
    """
    findings = [finding for check in SYMPTOMS if (finding := _apply(check, run, failures)) is not None]
    rest = (*(CAUSES if findings else ()), *FAULTS, *_registered)
    findings += [finding for check in rest if (finding := _apply(check, run, failures)) is not None]
    return sorted(findings, key=lambda finding: -finding.weight)


def _apply(check: Check, run: Run, failures: list[str] | None) -> Finding | None:
    try:
        return check(run)
    except Exception as error:
        if failures is None:
            raise
        failures.append(f"The check `{check.__name__}` failed on this record ({type(error).__name__}: {error}).")
        return None


def check_names() -> list[str]:
    """Return the names of the findings there can be."""
    return [check.__name__ for check in _all()]


def _all() -> tuple[Check, ...]:
    return (*SYMPTOMS, *CAUSES, *FAULTS, *_registered)
