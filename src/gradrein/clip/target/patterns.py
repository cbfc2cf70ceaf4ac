"""A mapping from name patterns to policies: which gradients each policy gets."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ...errors import ArgumentError, ArgumentTypeError
from ...policies import Policy
from ...policies.base import refuse_no_policy
from .._gradients import Gradients


def assign(
    policy: Policy | Mapping[str, Policy | None], grads: Gradients
) -> list[tuple[str, Policy | None, Gradients]]:
    """Return each policy with the gradients it is for. In a mapping the first pattern that matches a name wins."""
    check_policies(policy)
    if not isinstance(policy, Mapping):
        return [("*", policy, grads)]
    names = grads.known_names
    if grads.target_names is None or names is None:
        raise _no_names()
    indices: dict[str, list[int]] = {pattern: [] for pattern in policy}
    for i, name in enumerate(names):
        indices[_pattern_of(policy, name)].append(i)
    if not grads.has_others:  # else another process may hold what a pattern is for
        _refuse_unused_patterns(policy, grads.target_names)
    return [(pattern, rule, grads.subset(indices[pattern], pattern)) for pattern, rule in policy.items()]


def check_policies(policy: Any) -> None:
    """Refuse what is neither a policy nor a mapping from name patterns to policies."""
    if not isinstance(policy, Mapping):
        refuse_no_policy(policy)
        return
    for pattern, rule in policy.items():
        if not isinstance(pattern, str):
            raise ArgumentTypeError(
                f"a name pattern is a string such as 'head.*', found {type(pattern).__name__}: {pattern!r:.80}. Pass "
                "for instance {'head.*': gradrein.by_norm(0.5), '*': gradrein.by_norm(1.0)}."
            )
        if rule is not None:
            refuse_no_policy(rule)


def check_names(policy: Any, names: list[str] | None, trainable: list[bool], *, all_here: bool) -> None:
    """Refuse name patterns that will not fit the parameters with these names, or that have no names to fit.

    Args:
        policy: A policy or a mapping.
        names: The name of each parameter, if they have any.
        trainable: Whether each may get a gradient, and so needs a pattern.
        all_here: Whether no other rank holds other parameters, which an unused pattern may be for.
    """
    if not isinstance(policy, Mapping):
        return
    if names is None:
        raise _no_names()
    for name, needed in zip(names, trainable, strict=True):
        if needed:
            _pattern_of(policy, name)
    if all_here:
        _refuse_unused_patterns(policy, names)


def is_clipped(policy: Mapping[str, Any], name: str) -> bool:
    """Return whether a mapping has a policy for the parameter of this name."""
    pattern = _first_match(policy, name)
    return pattern is not None and policy[pattern] is not None


def _no_names() -> ArgumentError:
    return ArgumentError(
        "name patterns need names, and what was passed has none. Pass the module, `model.named_parameters()`, "
        "a dict, or an optimizer that was built from `named_parameters()`; to a Clipper, `model=model`."
    )


def _pattern_of(policy: Mapping[str, Any], name: str) -> str:
    pattern = _first_match(policy, name)
    if pattern is None:
        raise ArgumentError(
            f'no pattern matches the parameter {name!r}. Add one ("*" matches all; None leaves a group alone).'
        )
    return pattern


def _first_match(policy: Mapping[str, Any], name: str) -> str | None:
    return next((pattern for pattern in policy if fnmatchcase(name, pattern)), None)


def _refuse_unused_patterns(policy: Mapping[str, Any], names: list[str]) -> None:
    """Refuse a pattern that no parameter falls to, whether or not that parameter has a gradient now."""
    used = {_first_match(policy, name) for name in names}
    for pattern in policy:
        if pattern not in used:
            shadowed = any(fnmatchcase(name, pattern) for name in names)
            why = "an earlier pattern takes all that it matches" if shadowed else "no parameter has such a name"
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ArgumentError(f"the pattern {pattern!r} is never used: {why}. Names here: {some}.")
