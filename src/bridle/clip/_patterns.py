"""A mapping from name patterns to policies: which gradients each policy gets."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..errors import ArgumentError, GradientTypeError
from ..policies import Policy
from ._gradients import Gradients


def assign(
    policy: Policy | Mapping[str, Policy | None], grads: Gradients
) -> list[tuple[str, Policy | None, Gradients]]:
    """Return each policy with the gradients it is for. In a mapping the first pattern that matches a name wins."""
    if not isinstance(policy, Mapping):
        return [("*", _policy(policy), grads)]
    if grads.target_names is None or grads.known_names is None:
        raise ArgumentError(
            "name patterns need names, and what was passed has none. Pass the module, `model.named_parameters()`, "
            "a dict, or an optimizer that was built from `named_parameters()`."
        )
    indices: dict[str, list[int]] = {pattern: [] for pattern in policy}
    for i, name in enumerate(grads.known_names):
        pattern = _first_match(policy, name)
        if pattern is None:
            raise ArgumentError(
                f'no pattern matches the parameter {name!r}. Add one ("*" matches all; None leaves a group alone).'
            )
        indices[pattern].append(i)
    if grads.sharded is None or not grads.sharded.has_placement:  # else another rank may hold what a pattern is for
        _refuse_unused_patterns(policy, grads.target_names)
    return [
        (pattern, rule and _policy(rule), grads.subset(indices[pattern], pattern)) for pattern, rule in policy.items()
    ]


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


def _policy(found: Any) -> Policy:
    if callable(getattr(found, "decide", None)):  # not isinstance: torch.compile cannot trace a runtime protocol
        policy: Policy = found
        return policy
    raise GradientTypeError(
        f"a policy was expected, found {type(found).__name__}: {found!r:.80}. Pass one such as bridle.by_norm(1.0), "
        "or a mapping from name patterns to policies."
    )
