"""Describe a call in words that are the same on every rank that makes the same call."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import _devices
from ...policies.state import LearningPolicy


def describe_policy(policy: Any, same_parameters: bool = True) -> str:
    """Describe a policy, or a mapping from patterns to policies, by its settings and by what it was told since.

    Args:
        policy: The policy.
        same_parameters: Whether all ranks hold the same parameters.
    """
    if isinstance(policy, Mapping):
        rules = (f"{pattern!r}: {describe_policy(rule, same_parameters)}" for pattern, rule in policy.items())
        return "{" + ", ".join(rules) + "}"
    kind = type(policy).__name__.lstrip("_")
    # Attributes of another's policy may differ between ranks.
    public = [name for name in vars(policy) if not name.startswith("_")] if is_ours(policy) else []
    settings = {name: describe(getattr(policy, name), same_parameters) for name in public}
    told = policy.told(same_parameters) if isinstance(policy, LearningPolicy) else {}
    return f"{kind}({', '.join(f'{name}={value}' for name, value in (settings | told).items())})"


def is_ours(policy: object) -> bool:
    """Return whether a policy is of this package."""
    return type(policy).__module__.startswith("gradrein.")


def describe(value: Any, same_parameters: bool = True) -> str:
    """Describe a number, a tensor of one, or a policy. A tensor on a device is not read."""
    if isinstance(value, Tensor):
        return repr(value.item()) if _devices.readable_now([value]) else "a tensor"
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return repr(value)
    return describe_policy(value, same_parameters)
