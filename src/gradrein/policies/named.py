"""A policy by its name: the one place where `"auto"` becomes a policy.

Names are taken where an object keeps the state: `Clipper`, `Monitor` and the command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..errors import ArgumentError
from .base import Policy
from .median import ByMedian
from .overshoot import ByOvershoot
from .quantile import ByQuantile
from .running_norm import ByRunningNorm
from .skip_spikes import SkipSpikes
from .zscore import ByZScore

Policies: TypeAlias = Policy | str | Mapping[str, Policy | str | None]
"""A policy or the name of one that needs no arguments, for all or for each name pattern."""

_NAMES: dict[str, Callable[[], Policy]] = {
    "auto": ByOvershoot,  # benchmarks/steady.py compares it with the others
    "overshoot": ByOvershoot,
    "zscore": ByZScore,
    "quantile": ByQuantile,
    "median": ByMedian,
    "running_norm": ByRunningNorm,
    "skip_spikes": SkipSpikes,
}


def build(name: str) -> Policy:
    """Return a new policy by its name.

    Raises:
        ArgumentError: (a ValueError) No policy has this name.
    """
    if name not in _NAMES:
        raise ArgumentError(
            f"no policy is called {name!r}. Pass one of {', '.join(_NAMES)}, or a policy such as gradrein.by_norm(1.0)."
        )
    return _NAMES[name]()


def build_all(given: Policies) -> Any:
    """Return what was given, with a new policy in place of every name."""
    if isinstance(given, Mapping):
        return {pattern: build(own) if isinstance(own, str) else own for pattern, own in given.items()}
    return build(given) if isinstance(given, str) else given
