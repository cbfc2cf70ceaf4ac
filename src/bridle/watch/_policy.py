"""What may stand after `--clip` or in `Monitor(clip=...)`, as a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from .. import policies
from ..errors import ArgumentError
from ..policies import ByOvershoot, Policy, by_norm

__all__ = ["Clip", "policy_of"]

Clip: TypeAlias = float | str | Policy | None


def policy_of(clip: Clip) -> Policy | None:
    """A new policy for each call: those that adapt remember one optimizer's norms.

    Raises:
        ArgumentError: no number above 0 and no name of a policy that works without arguments.
    """
    if clip is None or isinstance(clip, Policy):
        return clip
    if not isinstance(clip, str):
        return by_norm(clip)
    if clip == "auto":  # what held every kind of run in benchmarks/steady.py without knowing it beforehand
        return ByOvershoot()
    try:
        return by_norm(float(clip))
    except ValueError as error:
        if isinstance(error, ArgumentError):
            raise
    name = f"by{clip}".replace("_", "").lower()  # "tracked_quantile" is ByTrackedQuantile
    maker: Callable[[], Any] | None = next((getattr(policies, n) for n in policies.__all__ if n.lower() == name), None)
    try:
        found = maker() if maker is not None else None
    except TypeError:  # a policy that needs an argument
        found = None
    if isinstance(found, Policy):
        return found
    raise ArgumentError(
        f'clipping is a largest norm such as 1.0, "auto", or a policy such as "zscore"; found {clip!r}.'
    )
