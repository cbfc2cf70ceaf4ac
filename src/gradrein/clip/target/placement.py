"""The `placement=` argument: which placements each parameter has."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from ...distributed import Disjoint, Group, Placement, PlacementSpec, Replicated, groups_of
from ...errors import ArgumentError


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


def _placements(given: Any) -> tuple[Placement, ...]:
    several: Any = () if given is None else (given,) if isinstance(given, Placement) else given
    if not isinstance(several, list | tuple) or not all(isinstance(each, Placement) for each in several):
        raise ArgumentError(
            f"`placement` is Disjoint(group), Sharded(group) or Replicated(group) of gradrein.distributed, several of "
            f"them, or a mapping from name patterns to those; found {type(given).__name__}: {given!r:.80}."
        )
    if len(several) > 1:
        _refuse_overlapping(tuple(several))
    return tuple(several)


def _refuse_overlapping(placements: tuple[Placement, ...]) -> None:
    """Raise where two placements of one pattern are about the same ranks: of these, both cannot be true."""
    given = [(each, group) for each in placements for group in groups_of(each.group)]
    for (one, group), (other, another) in combinations(given, 2):
        if len(set(group.ranks).intersection(another.ranks)) > 1 and not _copies_of(one, group, other, another):
            raise ArgumentError(
                f"`placement` is {type(one).__name__} over ranks {group.ranks} and {type(other).__name__} over ranks "
                f"{another.ranks} for the same parameters: these groups have more than one rank in common, and what "
                "lies there would count twice. Pass one placement for each dimension of a mesh, as in "
                '(Sharded(mesh["tp"]), Disjoint(mesh["pp"])).'
            )


def _copies_of(one: Placement, group: Group, other: Placement, another: Group) -> bool:
    """Return whether one of two placements says that there are copies of all that the other is about."""
    if isinstance(one, Disjoint) or isinstance(other, Disjoint):
        return False
    ranks, others = set(group.ranks), set(another.ranks)
    return (isinstance(one, Replicated) and ranks > others) or (isinstance(other, Replicated) and others > ranks)
