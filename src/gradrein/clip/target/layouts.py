"""How gradients lie over ranks, from DTensors and `placement=`. What would count twice, or is unclear, is refused."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._torch.dtensor import is_dtensor, specs_of, wait_tensor
from ..._torch.storage import repeats
from ...distributed import Disjoint, Group, Layout, Placement, Replicated, Sharded, collective, groups_of, in_order
from ...errors import ArgumentError, UnsupportedGradientError


class Layouts:
    """The layouts of the gradients of one call.

    Args:
        parameters: The parameters.
        grads: The gradient of each; None for one that is missing, whose parameter says how it would lie.
        patterns: The placements that were given for plain tensors, by pattern.
        pattern_of: For each parameter the index of its pattern.

    Attributes:
        each: The layout of each.
        groups: All process groups, in one order on every rank: those of meshes, larger meshes first; then of shards in
            plain tensors, of copies, and of ranks that hold different parameters.
        has_placement: Whether `placement=` was given: ranks may then hold different parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        grads: Sequence[Any],
        patterns: Sequence[tuple[Placement, ...]],
        pattern_of: Sequence[int],
    ) -> None:
        self._patterns = patterns
        self.has_placement = any(patterns)
        own = specs_of(parameters)
        specs = [spec or mine for spec, mine in zip(specs_of(grads), own, strict=True)]
        self._meshes = self._read_meshes(own, specs)
        known: dict[Any, Layout] = {}
        seen: dict[Any, Layout] = {}  # by identity, which is found sooner
        self.each = []
        for spec, number in zip(specs, pattern_of, strict=True):
            quick = (id(spec.mesh), id(spec.placements), number) if spec else number
            if quick not in seen:
                key = (id(spec.mesh), spec.placements, number) if spec else number
                seen[quick] = known[key] = known.get(key) or self._layout(spec, number)
            self.each.append(seen[quick])
        kinds = (Sharded, Replicated, Disjoint)
        placed = [self.placed(kind, placements) for kind in kinds for placements in patterns]
        self.groups = list(dict.fromkeys(g for groups in (*self._meshes.values(), *placed) for g in groups))

    def placed(self, kind: type, placements: tuple[Placement, ...]) -> tuple[Group, ...]:
        """Return the process groups that placements of one kind are about."""
        return tuple(group for each in placements if isinstance(each, kind) for group in groups_of(each.group))

    def _read_meshes(self, own: Sequence[Any], specs: Sequence[Any]) -> dict[int, tuple[Group, ...]]:
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
        for mesh in ordered[1:] if not self.has_placement else ():
            if not set(mesh.mesh.flatten().tolist()) <= set(ordered[0].mesh.flatten().tolist()):
                raise UnsupportedGradientError(
                    f"parameters are on {ordered[0]} and on {mesh}, and neither has all ranks of the other, so no rank "
                    "knows the norm of all. Put one of the parameters on a mesh of all ranks, or pass `placement=`."
                )
        return {id(mesh): groups_of(mesh) for mesh in ordered}

    def _layout(self, spec: Any, number: int) -> Layout:
        placements = self._patterns[number]
        widest = next(iter(self._meshes.values()), ())
        shards = self.placed(Sharded, placements)
        if spec is None:
            return Layout(shards, (-1,) * len(shards), () if placements else widest)
        groups = self._meshes[id(spec.mesh)]
        self._refuse_counted_twice(placements, {rank for group in groups for rank in group.ranks})
        cut = [(group, kind.dim) for group, kind in zip(groups, spec.placements, strict=True) if _is_shard(kind)]
        copies = [group for group, kind in zip(groups, spec.placements, strict=True) if not _is_shard(kind)]
        if not self.has_placement and spec.mesh.size() < math.prod(group.size for group in widest):
            # Every mesh of this size holds a copy: all ranks hear of a NaN in one of them.
            copies += [group for group in widest if group not in groups]
        over, dims = zip(*cut, strict=True) if cut else ((), ())
        return Layout((*over, *shards), (*dims, *(-1 for _ in shards)), tuple(copies))

    def _refuse_counted_twice(self, placements: tuple[Placement, ...], mesh: set[int]) -> None:
        """Raise where `placement` adds up a DTensor over ranks that it lies on itself."""
        for placement in placements:
            for group in groups_of(placement.group) if not isinstance(placement, Replicated) else ():
                twice = sorted(mesh.intersection(group.ranks))
                if len(twice) > 1:
                    raise ArgumentError(
                        f"`placement` is {type(placement).__name__} over ranks {group.ranks} for a DTensor on ranks "
                        f"{sorted(mesh)}: it would count on each of {twice}. A DTensor says itself how it lies on its "
                        'mesh: give it None by a name pattern, as in {"experts.*": Disjoint(group), "*": None}, or '
                        "pass a group with one rank of its mesh, such as that of the pipeline."
                    )


def _is_shard(kind: Any) -> bool:
    return not (kind.is_replicate() or kind.is_partial())


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


def writes_partial(grad: Any) -> bool:
    """Return whether this rank writes the value of a partial gradient. Of a sum, one rank does; others write zeros."""
    coordinates = zip(grad.device_mesh.get_coordinate(), grad.placements, strict=True)
    return all(at == 0 for at, kind in coordinates if kind.is_partial() and kind.reduce_op == "sum")


def refuse_shared_memory(grads: Sequence[Any], local: Sequence[Tensor], placed: Sequence[Any]) -> None:
    """Raise where a DTensor is in the memory of another gradient: it would be counted and scaled twice."""
    for i, k in repeats(local).items():
        if is_dtensor(grads[i]) or is_dtensor(grads[k]) or placed[i] != placed[k]:
            raise shared_memory(grads[i], grads[k])


def shared_memory(grad: Any, other: Any) -> UnsupportedGradientError:
    """Return the error for two gradients in one memory."""
    shapes = " and ".join(str(tuple(each.shape)) for each in (grad, other))
    return UnsupportedGradientError(
        f"two gradients, of shapes {shapes}, are in the same memory on this rank, so that it would be counted and "
        "scaled twice, or under two placements. Pass one of the two, or give one of them memory of its own (`clone()`)."
    )
