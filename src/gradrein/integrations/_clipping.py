"""Clipping in place of a trainer's own: by a number, a policy, its name, or a mapping from name patterns."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..policies import Policy, by_norm
from ..policies.named import build_all

ClipPolicy: TypeAlias = float | str | Policy | Mapping[str, float | str | Policy | None]
"""A largest norm, a policy or its name, for all parameters or for each name pattern."""


def policies_of(policy: ClipPolicy) -> Any:
    """Return what was given, with a policy in place of every number and name."""
    if isinstance(policy, Mapping):
        return {pattern: None if each is None else policies_of(each) for pattern, each in policy.items()}
    return by_norm(policy) if isinstance(policy, int | float) else build_all(policy)
