"""Named findings: one file each, and one entry in the table below.

Each file has one function from a run to a finding, or to None where its criterion is not met.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from ....errors import ArgumentError
from ...run.run import Run
from ..finding import Finding
from .clip_decay import clip_decay
from .clip_tight import clip_tight
from .cluster import cluster
from .dead import dead
from .depth import depth
from .dominant import dominant
from .edge_of_stability import edge_of_stability
from .heavy_tail import heavy_tail
from .loss_power import loss_power
from .noise_scale import noise_scale
from .nonfinite import nonfinite
from .oscillation import oscillation
from .overfitting import overfitting
from .precision import precision
from .rank_norms import rank_norms
from .rising import rising
from .sample_share import sample_share
from .spikes import spikes
from .straggler import straggler
from .unsettled import unsettled

__all__ = ["TABLE", "Check", "find", "register_finding"]

Check: TypeAlias = Callable[[Run], Finding | None]
C = TypeVar("C", bound=Check)

TABLE: tuple[Check, ...] = (
    nonfinite,
    rank_norms,
    oscillation,
    rising,
    overfitting,
    unsettled,
    edge_of_stability,
    heavy_tail,
    cluster,
    spikes,
    sample_share,
    loss_power,
    clip_decay,
    precision,
    dominant,
    depth,
    dead,
    clip_tight,
    noise_scale,
    straggler,
)
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
    if check in TABLE or check in _registered:
        raise ArgumentError(f"the check {check!r} is registered already.")
    _registered.append(check)
    return check


def find(run: Run, failures: list[str] | None = None) -> list[Finding]:
    """Apply every check once. What explains most comes first.

    Args:
        run: The run.
        failures: Where to put a sentence about a check that raises, so that the others are still reported. None: let
            it raise.
    """
    found = [finding for check in (*TABLE, *_registered) if (finding := _apply(check, run, failures)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)


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
    return [check.__name__ for check in (*TABLE, *_registered)]


def count_checks() -> int:
    """Return how many checks `find` applies."""
    return len(TABLE) + len(_registered)
