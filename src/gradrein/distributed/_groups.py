"""Process groups of device meshes and placements, in one order on every rank, and collectives over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._torch.process_group import group_device
from ..errors import RankError

_T = TypeVar("_T")


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
        """Its ranks, by their numbers among all."""
        return dist.get_process_group_ranks(self.group)


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
    return tuple(Group(g.group_name, g, torch.device(mesh.device_type)) for g in mesh.get_all_groups())


def in_order(meshes: Iterable[Any]) -> list[Any]:
    """Return meshes in an order that is the same on all ranks: larger ones first, so a mesh before its slices."""

    def place(mesh: Any) -> tuple[int, list[int], list[int]]:
        ranks = mesh.mesh
        return -ranks.numel(), ranks.flatten().tolist(), list(ranks.shape)

    several = list(meshes)
    return sorted(several, key=place) if len(several) > 1 else several


def collective(run: Callable[[], _T], group: Any, what: str) -> _T:
    """Run a collective of a process group. All of them come before anything is written.

    Args:
        run: The collective.
        group: The process group.
        what: What is exchanged, for the error.

    Raises:
        RankError: (a RuntimeError) A rank is gone, late, or made another call.
    """
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {dist.get_rank()} could not exchange {what} with ranks {dist.get_process_group_ranks(group)}: "
            f"{error}\nOne of them has ended, has raised an error of its own, has not made the same call within the "
            "group's timeout, or was called with other parameters: look at the first error in their logs. No gradient "
            "was changed on this rank."
        ) from error
