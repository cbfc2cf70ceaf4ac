"""How gradients lie over ranks, from DTensors and `placement=`. What would count twice, or is unclear, is refused."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from ..._torch.dtensor import is_dtensor, specs_of, wait_tensor
from ..._torch.storage import repeats
from ...distributed import (
    Disjoint,
    Group,
    Layout,
    PlacementSpec,
    collective,
    groups_of,
    in_order,
)
from ...errors import ArgumentError, UnsupportedGradientError
from .patterns import first_match


def placements_of(
    spec: PlacementSpec | None, names: list[str] | None, n: int
) -> tuple[list[tuple[Group, ...]], list[int]]:
    """Return for each pattern the groups whose ranks hold different parameters, and for each of n its pattern's index.

    Unlike a pattern for policies, one may match nothing here: another rank may hold what it is for.
    """
    if not isinstance(spec, Mapping):
        return [_groups(spec)], [0] * n
    if names is None:
        raise ArgumentError(
            "name patterns in `placement` need names, and what was passed has none. Pass the module, "
            "`model.named_parameters()`, a dict, or an optimizer that was built from `named_parameters()`."
        )
    place = {pattern: k for k, pattern in enumerate(spec)}
    pattern_of = [first_match(spec, name) for name in names]
    if None in pattern_of:
        raise ArgumentError(
            f"no pattern of `placement` matches the parameter {names[pattern_of.index(None)]!r}. Add one "
            '("*" matches all; None says nothing about them).'
        )
    return [_groups(each) for each in spec.values()], [place[pattern] for pattern in pattern_of if pattern]


def _groups(given: Any) -> tuple[Group, ...]:
    several: Any = () if given is None else (given,) if isinstance(given, Disjoint) else given
    if not isinstance(several, list | tuple) or not all(isinstance(each, Disjoint) for each in several):
        raise ArgumentError(
            "`placement` is Disjoint(group) of gradrein.distributed, several of them, or a mapping from name patterns "
            f"to those; found {type(given).__name__}: {given!r:.80}."
        )
    groups = tuple(group for each in several for group in groups_of(each.group))
    for one, other in combinations(groups, 2):
        if len({*one.ranks} & {*other.ranks}) > 1:
            raise ArgumentError(
                f"`placement` is Disjoint over ranks {one.ranks} and over ranks {other.ranks} for the same parameters: "
                "these groups have more than one rank in common, and what lies there would count twice. Pass one for "
                'each dimension of a mesh, as in (Disjoint(mesh["tp"]), Disjoint(mesh["pp"])).'
            )
    return groups


def layouts_of(
    parameters: Sequence[Any],
    grads: Sequence[Any],
    patterns: Sequence[tuple[Group, ...]],
    pattern_of: Sequence[int],
) -> tuple[list[Layout], list[Group]]:
    """Return the layout of each gradient, and all process groups in one order on every rank.

    These are the groups of meshes, larger meshes first; then of ranks that hold different parameters.

    Args:
        parameters: The parameters.
        grads: The gradient of each; None for one that is missing, whose parameter says how it would lie.
        patterns: The groups whose ranks hold different parameters, by pattern.
        pattern_of: For each parameter the index of its pattern.
    """
    own = specs_of(parameters)
    specs = [spec or mine for spec, mine in zip(specs_of(grads), own, strict=True)]
    meshes = _read_meshes(own, specs, any(patterns))
    widest = next(iter(meshes.values()), ())
    known: dict[Any, Layout] = {}
    seen: dict[Any, Layout] = {}  # by identity, which is found sooner
    each = []
    for spec, number in zip(specs, pattern_of, strict=True):
        quick = (id(spec.mesh), id(spec.placements), number) if spec else number
        if quick not in seen:
            key = (id(spec.mesh), spec.placements, number) if spec else number
            if key not in known and spec:
                _refuse_counted_twice(patterns[number], meshes[id(spec.mesh)])
                # Without `placement` every mesh of a size holds a copy: all ranks hear of a NaN in one of them.
                known[key] = _layout(spec, meshes[id(spec.mesh)], () if any(patterns) else widest)
            elif key not in known:
                known[key] = Layout(copies=() if patterns[number] else widest)
            seen[quick] = known[key]
        each.append(seen[quick])
    return each, list(dict.fromkeys(group for groups in (*meshes.values(), *patterns) for group in groups))


def _read_meshes(own: Sequence[Any], specs: Sequence[Any], has_placement: bool) -> dict[int, tuple[Group, ...]]:
    """Return the process groups of all meshes, in order."""
    meshes = {}
    for mine, spec in zip(own, specs, strict=True):
        if spec is not None:
            meshes[id(spec.mesh)] = spec.mesh
            if mine is not spec and mine is not None and mine.mesh is not spec.mesh and mine.mesh != spec.mesh:
                raise UnsupportedGradientError(
                    f"a gradient of shape {tuple(spec.shape)} is on {spec.mesh}, its parameter on {mine.mesh}. "
                    "Redistribute the gradient to the parameter's mesh before clipping."
                )
    ordered = in_order(meshes.values())
    for mesh in ordered[1:] if not has_placement else ():
        if not set(mesh.mesh.flatten().tolist()) <= set(ordered[0].mesh.flatten().tolist()):
            raise UnsupportedGradientError(
                f"parameters are on {ordered[0]} and on {mesh}, and neither has all ranks of the other, so no rank "
                "knows the norm of all. Put one of the parameters on a mesh of all ranks, or pass `placement=`."
            )
    return {id(mesh): groups_of(mesh) for mesh in ordered}


def _layout(spec: Any, groups: tuple[Group, ...], widest: tuple[Group, ...]) -> Layout:
    is_shard = [not (kind.is_replicate() or kind.is_partial()) for kind in spec.placements]
    copies = [group for group, shard in zip(groups, is_shard, strict=True) if not shard]
    if spec.mesh.size() < math.prod(group.size for group in widest):
        copies += [group for group in widest if group not in groups]
    over = tuple(group for group, shard in zip(groups, is_shard, strict=True) if shard)
    dims = tuple(kind.dim for kind, shard in zip(spec.placements, is_shard, strict=True) if shard)
    return Layout(over, dims, tuple(copies))


def _refuse_counted_twice(disjoint: Sequence[Group], groups: tuple[Group, ...]) -> None:
    """Raise where `placement` adds up a DTensor over ranks that it lies on itself."""
    mesh = {rank for group in groups for rank in group.ranks} if disjoint else set()
    for group in disjoint:
        twice = sorted(mesh.intersection(group.ranks))
        if len(twice) > 1:
            raise ArgumentError(
                f"`placement` is Disjoint over ranks {group.ranks} for a DTensor on ranks {sorted(mesh)}: it would "
                f"count on each of {twice}. A DTensor says itself how it lies on its mesh: give it None by a name "
                'pattern, as in {"experts.*": Disjoint(group), "*": None}, or pass a group with one rank of its mesh, '
                "such as that of the pipeline."
            )


def partial_ones(specs: Sequence[Any]) -> list[int]:
    """Return the gradients, by their specs, of which ranks hold summands."""
    placements = {id(spec.placements): spec.placements for spec in specs if spec is not None}
    partial = {key for key, kinds in placements.items() if any(kind.is_partial() for kind in kinds)}
    return [k for k, spec in enumerate(specs) if spec is not None and id(spec.placements) in partial] if partial else []


def reduced(grad: Any, what: str) -> Tensor:
    """Return the local shard of a partial gradient after reducing it: communication of its whole size."""
    from torch.distributed.tensor import Replicate

    for kind in grad.placements:
        if kind.is_partial() and kind.reduce_op not in ("sum", "avg", "max", "min"):
            raise UnsupportedGradientError(
                f"a gradient of shape {tuple(grad.shape)} is partial by {kind.reduce_op!r}, which scaling its shards "
                "does not scale. Redistribute it before clipping."
            )
    whole = [Replicate() if kind.is_partial() else kind for kind in grad.placements]
    group = grad.device_mesh.get_group(next(d for d, kind in enumerate(grad.placements) if kind.is_partial()))
    return wait_tensor(collective(lambda: grad.detach().redistribute(placements=whole).to_local(), group, what))


def refuse_shared_memory(grads: Sequence[Any], local: Sequence[Tensor], placements: Sequence[Any]) -> None:
    """Raise where a gradient is in the memory of another and one is a DTensor, or has another placement.

    It would be counted and scaled twice. The same tensor under the same placement counts once.
    """
    for i, k in repeats(local).items():
        alike = placements[i] == placements[k]
        if not alike or (grads[i] is not grads[k] and (is_dtensor(grads[i]) or is_dtensor(grads[k]))):
            shapes = " and ".join(str(tuple(each.shape)) for each in (grads[i], grads[k]))
            raise UnsupportedGradientError(
                f"two gradients, of shapes {shapes}, are in the same memory on this rank, so that it would be counted "
                "and scaled twice, or under two placements. Pass one of the two, or give one of them memory of its "
                "own (`clone()`)."
            )
