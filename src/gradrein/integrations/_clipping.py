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


class Meanwhile:
    """Attributes of a trainer that have other values for a while, such as those of its own clipping."""

    def __init__(self) -> None:
        self._were: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `restore`, unless it has the value already."""
        if getattr(owner, name, None) != value:
            self._were.setdefault((id(owner), name), (owner, name, vars(owner).get(name, self)))
            setattr(owner, name, value)

    def restore(self) -> None:
        """Give all attributes the values that they had at first."""
        for owner, name, was in self._were.values():
            if was is self:  # its class has it
                delattr(owner, name)
            else:
                setattr(owner, name, was)
        self._were.clear()
