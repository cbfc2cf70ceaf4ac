"""The argument of `--clip` and `Monitor(clip=...)`, as a policy."""

from typing import TypeAlias

from ..policies import Policy, by_norm
from ..policies.named import build

ClipOption: TypeAlias = float | str | Policy | None
"""The largest norm, "auto", the name of a policy, a policy, or None for no clipping.

See Also:
    [`gradrein.Monitor`][]
"""

LBFGS_CAUTION = (
    "LBFGS is clipped: its line search and its estimate of the curvature compare gradients, and clipped ones mislead "
    "them. Lower its learning rate instead."
)


def policy_of(clip: ClipOption) -> Policy | None:
    """Return a new policy for each call: those that adapt remember the norms of one optimizer.

    Raises:
        ArgumentError: (a ValueError) not a number above 0, nor the name of a policy.
    """
    if clip is None or isinstance(clip, Policy):
        return clip
    number = _number(clip) if isinstance(clip, str) else clip
    return build(str(clip)) if number is None else by_norm(number)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
