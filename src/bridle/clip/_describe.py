"""Describe a call in words that are the same on every rank that makes the same call."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import _devices


def describe_policy(policy: Any) -> str:
    """Describe a policy, or a mapping from patterns to policies, by its settings."""
    if isinstance(policy, Mapping):
        return "{" + ", ".join(f"{pattern!r}: {describe_policy(rule)}" for pattern, rule in policy.items()) + "}"
    kind = type(policy).__name__.lstrip("_")
    if not type(policy).__module__.startswith("bridle."):  # attributes of another's policy may differ between ranks
        return kind
    settings = (f"{name}={describe(value)}" for name, value in vars(policy).items() if not name.startswith("_"))
    return f"{kind}({', '.join(settings)})"


def describe(value: Any) -> str:
    """Describe a number, a tensor of one, or a policy. A tensor on a device is not read."""
    if isinstance(value, Tensor):
        return repr(value.item()) if _devices.readable_now([value]) else "a tensor"
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return repr(value)
    return describe_policy(value)
