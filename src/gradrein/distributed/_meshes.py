"""Process groups of device meshes and placements, in one order on every rank."""

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

    @property
    def size(self) -> int:
        """How many ranks it has."""
        size: int = self.group.size()
        return size

    @property
    def ranks(self) -> list[int]:
        """Its ranks, by their numbers among all.

        Raises:
            RankError: (a RuntimeError) The process group was destroyed.
        """
        try:
            return dist.get_process_group_ranks(self.group)
        except (RuntimeError, ValueError, KeyError) as error:
            raise _destroyed("a process group", error) from error


def groups_of(group_or_mesh: Any) -> tuple[Group, ...]:
    """Return the process groups that a process group, or each dimension of a device mesh, stands for."""
    if isinstance(group_or_mesh, dist.ProcessGroup):  # whose device must not depend on what a rank happens to hold
        return (Group(group_or_mesh.group_name, group_or_mesh, group_device(group_or_mesh)),)
    mesh = group_or_mesh
    if mesh.get_coordinate() is None:
        raise RankError(
            f"rank {dist.get_rank()} is not in the mesh of one of the parameters passed ({mesh}), so it cannot know "
            "their norm. Pass only parameters this rank takes part in, with "
            "placement=gradrein.distributed.Disjoint(...)."
        )
    try:
        return tuple(Group(g.group_name, g, torch.device(mesh.device_type)) for g in mesh.get_all_groups())
    except (RuntimeError, ValueError, KeyError) as error:
        raise _destroyed(f"a process group of {mesh}", error) from error


def in_order(meshes: Iterable[Any]) -> list[Any]:
    """Return meshes in an order that is the same on all ranks: larger ones first, so a mesh before its slices."""

    def place(mesh: Any) -> tuple[int, list[int], list[int]]:
        ranks = mesh.mesh
        return -ranks.numel(), ranks.flatten().tolist(), list(ranks.shape)

    several = list(meshes)
    return sorted(several, key=place) if len(several) > 1 else several


def _destroyed(what: str, error: Exception) -> RankError:
    return RankError(
        f"{what} no longer exists: {error}. Clip before destroy_process_group(). No gradient was changed on this rank."
    )
