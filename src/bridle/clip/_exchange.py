"""What ranks tell each other: one all-gather for each process group.

Every rank of a group tells the others the norm of its own piece of each gradient, one float64 each. Gathered rather
than summed, so that no power is ever sent (none can overflow, whatever the order of the norm), every rank does the
same sum over the same numbers (all get the same bits), copies count once, and a rank that holds something else, or was
called with something else, is found: every message begins with a fingerprint of both. On a mesh of several dimensions
who has found such a rank goes on to say so to the others, so that all of them stop before anything is written.

Private torch: `ProcessGroup._device_types`, `torch._assert_async`. Checked on torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError
from . import _measure

__all__ = ["Exchange", "Group", "Mesh", "group_of", "guarded", "plan", "read_mesh", "ready"]

# Values in a first message, whatever a rank holds: one that holds something else is then found by what it says, not
# by a message of another length, which ends the process under gloo. What does not fit goes in a second message.
_MESSAGE = 1024
_HEADER = 5  # how many values, and fingerprints: their kinds, the call, the parameters; is a fault known already?


@dataclass(frozen=True)
class Group:
    """A process group, told apart by its name, and the device its messages are on."""

    name: str
    group: Any = field(compare=False)
    device: torch.device = field(compare=False)


@dataclass(frozen=True)
class Mesh:
    """The process groups of the dimensions of a mesh, and its place among meshes."""

    groups: tuple[Group, ...]
    order: tuple[Any, ...] = field(compare=False)  # larger first, then by ranks: the same on all of its ranks

    def holds(self, other: Mesh) -> bool:
        """Are the other's groups among these, in the same order? Then its values can travel along."""
        rest = iter(self.groups)
        return all(group in rest for group in other.groups)


def group_of(group: Any) -> Group:
    """A bare process group. Where its messages are may not depend on what a rank happens to hold; a mesh says it."""
    types = sorted(device.type for device in group._device_types)
    return Group(group.group_name, group, torch.device("cpu" if "cpu" in types else types[0]))


def read_mesh(mesh: Any) -> Mesh:
    """What there is to know of a device mesh."""
    if mesh.get_coordinate() is None:
        raise RankError(
            f"rank {dist.get_rank()} is not in the mesh of one of the parameters passed ({mesh}), so it cannot know "
            "their norm. Pass only parameters this rank takes part in, and say groups=bridle.Stages(...)."
        )
    groups = tuple(Group(g.group_name, g, torch.device(mesh.device_type)) for g in mesh.get_all_groups())
    ranks = mesh.mesh
    return Mesh(groups, (-ranks.numel(), ranks.flatten().tolist(), list(ranks.shape)))


class Exchange:
    """The messages of one call.

    Args:
        call: what this rank was called with: the same words on every rank.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._fault = ""

    def share(
        self,
        values: Tensor,
        listed: list[tuple[int, bool]],
        orders: list[float],
        group: Group,
        what: int = 0,
        counts: Sequence[int] = (),
    ) -> None:
        """Replace the listed values by what they come to over a group: a p-norm of pieces, the largest of copies.

        Args:
            values: a value for each gradient.
            listed: which of them lie on the group, and whether in pieces.
            orders: the p of each value.
            group: the process group.
            what: a fingerprint of the parameters, the same on all ranks of the group.
            counts: how many parameters of each listed value are copies on this rank.
        """
        if not listed or group.group.size() == 1:
            return
        where, cut = [list(column) for column in zip(*listed, strict=True)]
        asked = [orders[k] for k in where]
        at = torch.tensor(where, device=values.device)
        sent = torch.cat([values[at], values.new_tensor(counts)])
        kinds = zlib.crc32(bytes(cut) + repr(sorted(set(asked))).encode())
        rows = self._gather(sent, group, kinds, what)
        rows, held = rows[:, : len(where)], rows[:, len(where) :]
        if counts:
            self._require(((held == 0) | (held == held.amax(0))).all(), group, lambda: _different_copies(held))
        values[at] = _over_ranks(rows, cut, asked).to(values.device)

    def share_total(self, value: float, count: int, p: float, group: Group, what: int) -> float:
        """The p-norm over a group of what each rank has of `count` gradients that all lie in pieces."""
        if group.group.size() == 1:
            return value
        sent = torch.tensor([value], dtype=torch.float64)
        return float(_measure.total(self._gather(sent, group, zlib.crc32(f"total {p}".encode()), what, count), p))

    def finish(self) -> None:
        """Raise if the ranks of any group did not agree."""
        if self._fault:
            raise RankError(f"{self._fault} No gradient was changed.")

    def _gather(self, sent: Tensor, group: Group, kinds: int, what: int, count: int | None = None) -> Tensor:
        """What every rank of a group sent, a row for each: the one collective. Zeros where they do not agree."""
        size, room = len(sent), _MESSAGE - _HEADER
        told = [size if count is None else count, kinds, zlib.crc32(self._call.encode()), what, bool(self._fault)]
        first = torch.cat([sent.new_tensor(told), sent[:room], sent.new_zeros(max(0, room - size))])
        rows = _all_gather(first, group)
        heads = rows[:, :_HEADER]
        alike = (heads == heads[0]).all() & (heads[:, -1] == 0).all()
        if not self._require(alike, group, lambda: _disagreement(heads, self._call)):
            return rows.new_zeros(len(rows), size)
        rows = rows[:, _HEADER : _HEADER + size]
        return rows if size <= room else torch.cat([rows, _all_gather(sent[room:], group)], dim=1)

    def _require(self, holds: Tensor, group: Group, otherwise: Callable[[], str]) -> bool:
        """Every rank of the group sees the same numbers, so all of them note the fault, or none."""
        if holds.device.type != "cpu":  # reading would wait for the device
            torch._assert_async(holds, "bridle: the ranks of a group passed different parameters to one clipping call")
        elif not holds:
            self._fault = self._fault or f"ranks {dist.get_process_group_ranks(group.group)} {otherwise()}"
            return False
        return True


def _over_ranks(rows: Tensor, cut: list[bool], orders: list[float]) -> Tensor:
    """One value for each column: the p-norm of pieces, the largest of copies."""
    if all(cut) and len(set(orders)) == 1:
        return _measure.total(rows, orders[0])
    best = rows.amax(0)
    for p in set(orders):
        pieces = [c for c, (is_piece, q) in enumerate(zip(cut, orders, strict=True)) if is_piece and q == p]
        if pieces:
            best[pieces] = _measure.total(rows[:, pieces], p)
    return best


def _all_gather(sent: Tensor, group: Group) -> Tensor:
    there = sent.to(group.device)
    rows = there.new_empty(group.group.size() * len(there))
    guarded(lambda: dist.all_gather_single(rows, there, group=group.group), group.group)
    return rows.view(-1, len(there))


def ready(t: Any) -> Tensor:
    """A local tensor whose communication, if it is still under way, has been waited for."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    waiting = module is not None and isinstance(t, module.AsyncCollectiveTensor)
    found: Tensor = t.wait() if waiting else t
    return found


def guarded(collective: Callable[[], Any], group: Any) -> Any:
    """A collective whose failure is an error of ours. It comes before anything is written."""
    try:
        return collective()
    except RuntimeError as error:
        raise RankError(
            f"rank {dist.get_rank()} could not exchange gradient norms with ranks "
            f"{dist.get_process_group_ranks(group)}: {error}\n"
            "One of them has ended, has not come to this call within the group's timeout, or was called with other "
            "parameters: look at the first error among their logs. No gradient was changed on this rank."
        ) from error


def _disagreement(heads: Tensor, call: str) -> str:
    counts, _, calls, parameters, faults = [set(column) for column in heads.T.tolist()]
    if True in faults:
        return "were to clip together, and one of them does not agree with others: see what it has raised."
    if len(calls) > 1:
        return (
            f"were not called with the same arguments: this one, rank {dist.get_rank()}, with {call}. Every rank has "
            "to make the same call."
        )
    hold = "lay them out or measure them otherwise"
    if len(counts) > 1:
        hold = f"hold {heads[:, 0].int().tolist()} of them, in this order"
    elif len(parameters) > 1:
        hold = "list others, or the same ones in another order, by their names, shapes or types"
    return (
        f"share gradients and do not agree on them: they {hold}. Every rank has to make the same call, with the same "
        "parameters in the same order."
    )


def _different_copies(held: Tensor) -> str:
    return (
        f"hold different numbers of parameters under one Replicated pattern: {held.int().tolist()}, a row for each "
        "rank. Those that hold any have to hold the same ones: use one pattern for each set of copies."
    )


def plan(meshes: Iterable[Mesh]) -> list[tuple[Mesh, list[Mesh]]]:
    """Meshes to go through, in an order that is the same on all ranks, with the meshes whose values travel along.

    A mesh is larger than its slices, and so comes before them; its members agree on which meshes hold it.
    """
    found: list[tuple[Mesh, list[Mesh]]] = []
    for mesh in sorted(meshes, key=lambda m: m.order):
        for head, riders in found:
            if head.holds(mesh):
                riders.append(mesh)
                break
        else:
            found.append((mesh, [mesh]))
    return found
