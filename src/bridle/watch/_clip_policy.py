"""The argument of `--clip` and `Monitor(clip=...)`, as a policy."""

from collections.abc import Callable
from typing import Any, TypeAlias

from .. import policies
from ..errors import ArgumentError
from ..policies import ByOvershoot, Policy, by_norm

ClipOption: TypeAlias = float | str | Policy | None
"""The largest norm, "auto", the name of a policy, a policy, or None for no clipping."""

LBFGS_CAUTION = (
    "LBFGS is clipped: its line search and its estimate of the curvature compare gradients, and clipped ones mislead "
    "them. Lower its learning rate instead."
)


def policy_of(clip: ClipOption) -> Policy | None:
    """Return a new policy for each call: those that adapt remember the norms of one optimizer.

    Raises:
        ArgumentError: (a ValueError) not a number above 0, nor the name of a policy that works without arguments.
    """
    if clip is None or isinstance(clip, Policy):
        return clip
    if not isinstance(clip, str):
        return by_norm(clip)
    if clip == "auto":  # held every kind of run in benchmarks/steady.py
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
