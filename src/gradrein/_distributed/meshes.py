"""Process groups of device meshes, in an order that is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .._torch.process_group import group_device
from ..errors import RankError


@dataclass(frozen=True)
class Group:
    """A process group, identified by its name, and the device its messages are on."""

    name: str
    group: Any = field(compare=False)
    device: torch.device = field(compare=False)


@dataclass(frozen=True)
class MeshGroups:
    """The process groups of the dimensions of a mesh, and its place among meshes."""

    groups: tuple[Group, ...]
    order: tuple[Any, ...] = field(compare=False)  # larger first, then by ranks: the same on all of its ranks

    @property
    def ranks(self) -> list[int]:
        """The ranks of the mesh."""
        found: list[int] = self.order[1]
        return found

    def contains(self, other: MeshGroups) -> bool:
        """Return whether the other's groups are among these, in the same order: its values can be sent along."""
        rest = iter(self.groups)
        return all(group in rest for group in other.groups)


def ranks_of(group: Group) -> list[int]:
    """Return the ranks of a process group.

    Raises:
        RankError: (a RuntimeError) It was destroyed.
    """
    try:
        return dist.get_process_group_ranks(group.group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise RankError(
            f"a process group of `placement` no longer exists: {error}. Clip before destroy_process_group(). No "
            "gradient was changed on this rank."
        ) from error


def bare_group(group: Any) -> Group:
    """Describe a process group without a mesh. Its device must not depend on what a rank happens to hold."""
    return Group(group.group_name, group, group_device(group))


def groups_of(group_or_mesh: Any) -> tuple[Group, ...]:
    """Return the process groups that a process group or a device mesh stands for."""
    if isinstance(group_or_mesh, dist.ProcessGroup):
        return (bare_group(group_or_mesh),)
    return groups_of_mesh(group_or_mesh)


def read_mesh(mesh: Any) -> MeshGroups:
    """Describe a device mesh that this rank is in."""
    groups, ranks = groups_of_mesh(mesh), mesh.mesh
    return MeshGroups(groups, (-ranks.numel(), ranks.flatten().tolist(), list(ranks.shape)))


def groups_of_mesh(mesh: Any) -> tuple[Group, ...]:
    """Return the process groups of the dimensions of a device mesh that this rank is in."""
    if mesh.get_coordinate() is None:
        raise RankError(
            f"rank {dist.get_rank()} is not in the mesh of one of the parameters passed ({mesh}), so it cannot know "
            "their norm. Pass only parameters this rank takes part in, with "
            "placement=gradrein.distributed.Disjoint(...)."
        )
    try:
        return tuple(Group(g.group_name, g, torch.device(mesh.device_type)) for g in mesh.get_all_groups())
    except (RuntimeError, ValueError, KeyError) as error:
        raise RankError(
            f"the process groups of {mesh} no longer exist: {error} Parameters on it cannot be clipped after "
            "destroy_process_group(). No gradient was changed on this rank."
        ) from error


def order_meshes(meshes: Iterable[MeshGroups]) -> list[tuple[MeshGroups, list[MeshGroups]]]:
    """Return meshes in an order that is the same on all ranks, each with the submeshes whose values are sent along.

    A mesh is larger than its slices and so comes before them; its members agree on which meshes contain it.
    """
    found: list[tuple[MeshGroups, list[MeshGroups]]] = []
    for mesh in sorted(meshes, key=lambda m: m.order):
        for head, submeshes in found:
            if head.contains(mesh):
                submeshes.append(mesh)
                break
        else:
            found.append((mesh, [mesh]))
    return found
