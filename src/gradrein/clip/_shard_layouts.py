"""How gradients lie over ranks: sharded, replicated or partial, and on which process groups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, repeat
from operator import is_
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.collectives import collective
from .._distributed.meshes import Group, MeshGroups, groups_of, ranks_of, read_mesh
from .._torch.dtensor import dtensor_class, is_dtensor, specs_of, wait_tensor
from ..distributed import Disjoint, Placement, Replicated, Sharded
from ..errors import ArgumentError, RankError, UnsupportedGradientError
from ._norm_exchange import WHAT


def on_several_ranks(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether any is a DTensor. Where none can exist, they are not looked at."""
    if (kind := dtensor_class()) is None or not dist.is_available():
        return False
    if torch.compiler.is_compiling() and not dist.is_initialized():  # nothing to trace
        return False
    found = any(issubclass(t, kind) for t in set(map(type, tensors)))
    if found and not dist.is_initialized():
        raise RankError(
            "parameters are DTensors, but the process group of this process was destroyed, so their norm cannot be "
            "computed. Clip before destroy_process_group(). No gradient was changed on this rank."
        )
    return found


def missing_here(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    patterns: Sequence[tuple[Placement, ...]],
    pattern_of: Sequence[int],
) -> list[int]:
    """Return parameters without a gradient here that lie on several ranks, each once: the others may have one."""
    sharded = sharded_patterns(patterns)
    first: dict[int, int] = {}
    for i, (p, g) in enumerate(zip(parameters, grads, strict=True)):
        if g is None and (sharded[pattern_of[i]] or is_dtensor(p)):
            first.setdefault(id(p), i)
    return list(first.values())


def has_copies(parameters: Sequence[Any]) -> bool:
    """Return whether any is a DTensor that is copied over a dimension of its mesh."""
    placements = (spec.placements for spec in specs_of(parameters) if spec is not None)
    return any(kind.is_replicate() for kinds in placements for kind in kinds)


@dataclass(frozen=True)
class ShardLayout:
    """How a DTensor lies on its mesh."""

    mesh: MeshGroups
    sharded: tuple[bool, ...]  # for each dimension of the mesh: shards on its ranks, or copies
    partial: bool
    dims: tuple[int, ...]  # for each dimension of the mesh: which of the tensor's it cuts; -1 for none

    def cut_dims(self, group: Group) -> set[int]:
        """Return the dimensions of the tensor that a process group cuts."""
        found = zip(self.mesh.groups, self.dims, strict=True)
        return {dim for each, dim in found if each == group and dim >= 0}

    @property
    def copies_last(self) -> bool:
        """Whether shards are added up before their copies are compared: a sum that lacks some may be the largest."""
        kinds = [cut for group, cut in zip(self.mesh.groups, self.sharded, strict=True) if group.group.size() > 1]
        return (True, False) in pairwise(kinds)


Place: TypeAlias = tuple[ShardLayout | None, int]
"""How a gradient lies on a mesh, None for a plain tensor, and the index of its pattern of `placement`."""


def one_mesh(own: Sequence[Any], specs: Sequence[Any]) -> Any:
    """Return the mesh that all parameters lie on; None where there are several, or other tensors than DTensors.

    Args:
        own: The specs of the parameters.
        specs: The specs of their gradients. torch may give one an equal mesh that was made before.
    """
    try:
        meshes = [spec.mesh for spec in own]
        others = [] if all(map(is_, own, specs)) else [spec.mesh for spec in specs]
    except AttributeError:  # of None
        return None
    mesh = meshes[0] if meshes else None
    return mesh if all(map(is_, meshes, repeat(mesh))) and others.count(mesh) == len(others) else None


def wide_ones(parameters: Sequence[Any], specs: Sequence[Any], local: Sequence[Tensor]) -> set[int]:
    """Return those whose values may be out of the range of float32, by the type of the parameter or of its gradient.

    Args:
        parameters: The parameters.
        specs: The spec of each that is a DTensor, which tells its type at a tenth of the cost.
        local: What this rank holds of each gradient.
    """
    large = (torch.float64, torch.complex128)
    own = [p.dtype if s is None else s.tensor_meta.dtype for p, s in zip(parameters, specs, strict=True)]
    types = [t.dtype for t in local]
    if not {*own, *types}.intersection(large):
        return set()
    return {i for i, pair in enumerate(zip(own, types, strict=True)) if not set(pair).isdisjoint(large)}


def sharded_patterns(patterns: Sequence[tuple[Placement, ...]]) -> list[bool]:
    return [any(isinstance(each, Sharded) for each in placements) for placements in patterns]


def read_layout(mesh: Any, placements: Sequence[Any]) -> ShardLayout:
    partial = any(kind.is_partial() for kind in placements)
    sharded = tuple(not (k.is_replicate() or k.is_partial()) for k in placements)
    return ShardLayout(read_mesh(mesh), sharded, partial, cut_dims(placements))


def cut_dims(placements: Sequence[Any]) -> tuple[int, ...]:
    return tuple(-1 if k.is_replicate() or k.is_partial() else k.dim for k in placements)


def groups_of_patterns(patterns: Iterable[tuple[Placement, ...]], kinds: tuple[type, ...]) -> list[Group]:
    """Return the process groups that placements of some kinds are about, each once, in order."""
    found: dict[Group, None] = {}
    for placement in (each for placements in patterns for each in placements if isinstance(each, kinds)):
        found.update(dict.fromkeys(groups_of(placement.group)))
    return list(found)


def refuse_counted_twice(places: Iterable[Place], patterns: Sequence[tuple[Placement, ...]]) -> None:
    """Raise where `placement` adds up over the same ranks twice, or over ranks that a DTensor lies on."""
    for placements in patterns:
        _refuse_overlapping(placements)
    lies = [(layout.mesh.ranks, patterns[number]) for layout, number in places if layout is not None]
    for mesh, placement in ((mesh, each) for mesh, several in lies for each in several):
        for group in groups_of(placement.group) if isinstance(placement, Disjoint | Sharded) else ():
            ranks = ranks_of(group)
            twice = sorted(set(ranks).intersection(mesh))
            if len(twice) > 1:
                raise ArgumentError(
                    f"`placement` is {type(placement).__name__} over ranks {ranks} for a DTensor on ranks {mesh}: it "
                    f"would count on each of {twice}. A DTensor says itself how it lies on its mesh: give it None by a "
                    'name pattern, as in {"experts.*": Disjoint(group), "*": None}, or pass a group with one rank of '
                    "its mesh, such as that of the pipeline."
                )


def _refuse_overlapping(placements: tuple[Placement, ...]) -> None:
    """Raise where two placements of one pattern are about the same ranks: of these, both cannot be true."""
    said = [(each, group) for each in placements for group in groups_of(each.group)]
    for (one, group), (other, another) in combinations(said, 2):
        ranks, others = ranks_of(group), ranks_of(another)
        if len(set(ranks).intersection(others)) > 1 and not _copies_of(one, ranks, other, others):
            raise ArgumentError(
                f"`placement` is {type(one).__name__} over ranks {ranks} and {type(other).__name__} over ranks "
                f"{others} for the same parameters: these groups have more than one rank in common, and what lies "
                "there would count twice. Pass one placement for each dimension of a mesh, as in "
                '(Sharded(mesh["tp"]), Disjoint(mesh["pp"])).'
            )


def _copies_of(one: Placement, ranks: Sequence[int], other: Placement, others: Sequence[int]) -> bool:
    """Return whether one of two placements says that there are copies of all that the other is about."""
    if isinstance(one, Disjoint) or isinstance(other, Disjoint):
        return False
    return (isinstance(one, Replicated) and set(ranks) > set(others)) or (
        isinstance(other, Replicated) and set(others) > set(ranks)
    )


def reduced(grad: Any) -> Tensor:
    """Return the local shard of a partial gradient after reducing it: communication of its whole size."""
    from torch.distributed.tensor import Replicate

    for kind in grad.placements:
        if kind.is_partial() and kind.reduce_op not in ("sum", "avg", "max", "min"):
            raise UnsupportedGradientError(
                f"a gradient of shape {tuple(grad.shape)} is partial by {kind.reduce_op!r}, which scaling its shards "
                "does not scale. Redistribute it before clipping."
            )
    reduced = [Replicate() if kind.is_partial() else kind for kind in grad.placements]
    group = grad.device_mesh.get_group(next(d for d, kind in enumerate(grad.placements) if kind.is_partial()))
    return wait_tensor(collective(lambda: grad.detach().redistribute(placements=reduced).to_local(), group, WHAT))


def writes_partial(grad: Any) -> bool:
    """Return whether this rank writes the value of a partial gradient. Of a sum, one rank does; others write zeros."""
    coordinates = zip(grad.device_mesh.get_coordinate(), grad.placements, strict=True)
    return all(at == 0 for at, kind in coordinates if kind.is_partial() and kind.reduce_op == "sum")


def other_mesh(parameter: Any, gradient: Any) -> UnsupportedGradientError:
    """Return the error for specs of a parameter and of its gradient that are on different meshes."""
    return UnsupportedGradientError(
        f"a gradient of shape {tuple(gradient.shape)} is on {gradient.mesh}, its parameter on {parameter.mesh}. "
        "Redistribute the gradient to the parameter's mesh before clipping."
    )
