"""Clipping in place of a trainer's own: by a number, a policy, its name, or a mapping from name patterns."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..policies import Policy, by_norm
from ..policies.named import build_all

ClipRules: TypeAlias = float | str | Policy | Mapping[str, float | str | Policy | None]
"""A largest norm, a policy or its name, for all parameters or for each name pattern."""


def policies_of(rules: ClipRules) -> Any:
    """Return the rules with a policy in place of every number and name."""
    if isinstance(rules, Mapping):
        return {pattern: None if rule is None else policies_of(rule) for pattern, rule in rules.items()}
    return by_norm(rules) if isinstance(rules, int | float) else build_all(rules)
