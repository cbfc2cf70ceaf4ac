"""The `placement=` argument: which placements each parameter has."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..distributed import Placement, PlacementSpec
from ..errors import ArgumentError


def placements_of(
    spec: PlacementSpec | None, names: list[str] | None, n: int
) -> tuple[list[tuple[Placement, ...]], list[int]]:
    """Return the placements of each pattern, and for each of n parameters the index of the first pattern that matches.

    Unlike a pattern for policies, one may match nothing here: another rank may hold what it is for.
    """
    if not isinstance(spec, Mapping):
        return [_placements(spec)], [0] * n
    if names is None:
        raise ArgumentError(
            "name patterns in `placement` need names, and what was passed has none. Pass the module, "
            "`model.named_parameters()`, a dict, or an optimizer that was built from `named_parameters()`."
        )
    patterns = list(spec)
    pattern_of = [next((k for k, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), -1) for name in names]
    if -1 in pattern_of:
        raise ArgumentError(
            f"no pattern of `placement` matches the parameter {names[pattern_of.index(-1)]!r}. Add one "
            '("*" matches all; None says nothing about them).'
        )
    return [_placements(spec[pattern]) for pattern in patterns], pattern_of


def _placements(found: Any) -> tuple[Placement, ...]:
    several: Any = () if found is None else (found,) if isinstance(found, Placement) else found
    if not isinstance(several, list | tuple) or not all(isinstance(each, Placement) for each in several):
        raise ArgumentError(
            f"`placement` is Disjoint(group), Sharded(group) or Replicated(group) of gradrein.distributed, several of "
            f"them, or a mapping from name patterns to those; found {type(found).__name__}: {found!r:.80}."
        )
    return tuple(several)
