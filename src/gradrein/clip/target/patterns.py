"""Policies of a call: which gradients each gets by name pattern, and words for it that all ranks share."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from ... import _devices
from ...errors import ArgumentError, ArgumentTypeError
from ...policies.base import refuse_no_policy
from ...policies.state import LearningPolicy
from .parameters import GROUP


def check_policies(policy: Any) -> None:
    """Refuse what is neither a policy nor a mapping from name patterns to policies."""
    if not isinstance(policy, Mapping):
        refuse_no_policy(policy)
        return
    for pattern, own in policy.items():
        if not isinstance(pattern, str):
            raise ArgumentTypeError(
                f"a name pattern is a string such as 'head.*', found {type(pattern).__name__}: {pattern!r:.80}. Pass "
                "for instance {'head.*': gradrein.by_norm(0.5), '*': gradrein.by_norm(1.0)}."
            )
        if own is not None:
            refuse_no_policy(own)


def match_names(
    policy: Mapping[str, Any],
    names: list[str] | None,
    labels: list[str] | None,
    needed: list[bool],
    *,
    all_here: bool,
) -> list[str | None]:
    """Return the first pattern that matches each parameter. Refuse patterns that do not fit.

    Args:
        policy: The mapping.
        names: The name of each parameter, if they have any.
        labels: Its parameter group in an optimizer, as `group:0`, if there is one.
        needed: Which of them need a pattern: those that may get a gradient.
        all_here: Whether no other rank holds other parameters, which an unused pattern may be for.
    """
    of_groups = [pattern for pattern in policy if pattern.startswith(GROUP)]
    if labels is None and of_groups:
        raise ArgumentError(
            f"the pattern {of_groups[0]!r} is for a parameter group of an optimizer. Pass the optimizer instead of "
            "parameters."
        )
    if names is None and not (of_groups and set(policy) <= {*of_groups, "*"}):
        raise ArgumentError(
            "name patterns need names, and what was passed has none. Pass the module, `model.named_parameters()`, "
            "a dict, or an optimizer that was built from `named_parameters()`; to a Clipper, `model=model`."
        )
    known, groups = names or [""] * len(needed), labels or [""] * len(needed)
    pattern_of = [first_match(policy, name, label) for name, label in zip(known, groups, strict=True)]
    for i, pattern in enumerate(pattern_of):
        if pattern is None and needed[i]:
            raise ArgumentError(
                f"no pattern matches the parameter {known[i] or groups[i]!r}. Add one "
                '("*" matches all; None leaves a group alone).'
            )
    for pattern in policy if all_here else ():
        if pattern not in pattern_of:
            shadowed = any(first_match({pattern: 0}, *each) for each in zip(known, groups, strict=True))
            why = "an earlier pattern takes all that it matches" if shadowed else "no parameter has such a name"
            some = [*dict.fromkeys(groups if pattern.startswith(GROUP) else known)]
            raise ArgumentError(
                f"the pattern {pattern!r} is never used: {why}. Names here: {', '.join(some[:8])}"
                f"{', ...' if len(some) > 8 else ''}."
            )
    return pattern_of


def first_match(patterns: Mapping[str, Any], name: str, label: str = "") -> str | None:
    """Return the first pattern that matches a name, or the label of a parameter group, if any does."""
    matches = (p for p in patterns if fnmatchcase(label if p.startswith(GROUP) else name, p))
    return next(matches, None)


def describe_policy(policy: Any, same_parameters: bool = True) -> str:
    """Describe a policy, or a mapping from patterns to policies, by its settings and by the state that was loaded.

    Args:
        policy: The policy.
        same_parameters: Whether all ranks hold the same parameters.
    """
    if isinstance(policy, Mapping):
        own = (f"{pattern!r}: {describe_policy(each, same_parameters)}" for pattern, each in policy.items())
        return "{" + ", ".join(own) + "}"
    kind = type(policy).__name__.lstrip("_")
    is_ours = type(policy).__module__.startswith("gradrein.")  # attributes of another's may differ between ranks
    public = [name for name in vars(policy) if not name.startswith("_")] if is_ours else []
    settings = {name: describe(getattr(policy, name), same_parameters) for name in public}
    loaded = policy.compared_between_ranks(same_parameters) if isinstance(policy, LearningPolicy) else {}
    return f"{kind}({', '.join(f'{name}={value}' for name, value in (settings | loaded).items())})"


def describe(value: Any, same_parameters: bool = True) -> str:
    """Describe a number, a tensor of one, or a policy. A tensor on a device is not read."""
    if isinstance(value, Tensor):
        return repr(value.item()) if _devices.readable_now([value]) else "a tensor"
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return repr(value)
    return describe_policy(value, same_parameters)
