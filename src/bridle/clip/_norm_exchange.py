"""Cross-rank norms: one all-gather per process group.

Every rank sends the norm of its own shard of each gradient, one float64 each. Norms are gathered rather than their
powers summed: no power can overflow, whatever the order of the norm; every rank computes the same sum over the same
numbers, so all get the same bits; copies count once; and a rank that holds or was called with something else is found,
because every message begins with a fingerprint of both. On a mesh of several dimensions, a rank that has found such a
fault goes on to tell the others, so that all of them stop before anything is written.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _measure
from .._distributed.agreement import agree, fingerprint
from .._distributed.collectives import all_gather_rows
from .._distributed.meshes import Group
from .._torch.process_group import assert_async
from ..errors import RankError

MESSAGE = 1024  # values in a first message
WHAT = "gradient norms"


class NormExchange:
    """The messages of one call.

    Args:
        call: What this rank was called with: the same words on every rank.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self._fault = ""

    def all_gather_norms(
        self,
        values: Tensor,
        entries: list[tuple[int, bool]],
        orders: list[float],
        group: Group,
        parameters: int = 0,
        copies: Sequence[int] = (),
    ) -> None:
        """Replace values by what they come to over a process group: a p-norm of shards, the largest of copies.

        Args:
            values: One value per gradient.
            entries: Which of them lie on the group, and whether as shards (else as copies).
            orders: The p of each value.
            group: The process group.
            parameters: A fingerprint of the parameters, the same on all ranks of the group.
            copies: How many parameters behind each entry are copies on this rank.
        """
        if not entries or group.group.size() == 1:
            return
        where, sharded = [list(column) for column in zip(*entries, strict=True)]
        entry_orders = [orders[k] for k in where]
        at = torch.tensor(where, device=values.device)
        sent = torch.cat([values[at], values.new_tensor(copies)])
        kinds = fingerprint((sharded, sorted(set(entry_orders))))
        rows = self._gather(sent, group, kinds, parameters)
        rows, held = rows[:, : len(where)], rows[:, len(where) :]
        if copies:
            same = ((held == 0) | (held == held.amax(0))).all()
            self._require(same, group, lambda: _different_copies(held))
        values[at] = _over_ranks(rows, sharded, entry_orders).to(values.device)

    def total_norm(self, value: float, count: int, p: float, group: Group, parameters: int) -> float:
        """Return the p-norm over a group of what each rank has of `count` gradients, all of them sharded."""
        if group.group.size() == 1:
            return value
        sent = torch.tensor([value], dtype=torch.float64)
        rows = self._gather(sent, group, fingerprint(f"total {p}"), parameters, count)
        return float(_measure.total(rows, p))

    def finish(self) -> None:
        """Raise if the ranks of any group did not agree."""
        if self._fault:
            raise RankError(f"{self._fault} No gradient was changed.")

    def _gather(self, sent: Tensor, group: Group, kinds: int, parameters: int, count: int | None = None) -> Tensor:
        """Return what every rank of a group sent, one row each: the one collective. Zeros where they do not agree."""
        header = [len(sent) if count is None else count, kinds, fingerprint(self._call), parameters, bool(self._fault)]

        def gather(message: Tensor) -> Tensor:
            there = message.to(group.device)
            return all_gather_rows(there, group.group, WHAT).view(-1, len(there))

        def accept(headers: Tensor) -> bool:
            same = (headers == headers[0]).all() & (headers[:, -1] == 0).all()
            return self._require(same, group, lambda: _disagreement(headers, self._call))

        rows = agree(header, sent, MESSAGE, gather, accept)
        return torch.zeros(group.group.size(), len(sent), dtype=sent.dtype) if rows is None else rows

    def _require(self, condition: Tensor, group: Group, otherwise: Callable[[], str]) -> bool:
        """Note a fault. Every rank of the group sees the same numbers, so all of them note it, or none."""
        if condition.device.type != "cpu":  # reading would wait for the device
            assert_async(condition, "bridle: the ranks of a group passed different parameters to one clipping call")
        elif not condition:
            self._fault = self._fault or f"ranks {dist.get_process_group_ranks(group.group)} {otherwise()}"
            return False
        return True


def _over_ranks(rows: Tensor, sharded: list[bool], orders: list[float]) -> Tensor:
    """Return one value per column: the p-norm of shards, the largest of copies."""
    if all(sharded) and len(set(orders)) == 1:
        return _measure.total(rows, orders[0])
    best = rows.amax(0)
    for p in set(orders):
        shards = [c for c, (is_shard, q) in enumerate(zip(sharded, orders, strict=True)) if is_shard and q == p]
        if shards:
            best[shards] = _measure.total(rows[:, shards], p)
    return best


def _disagreement(headers: Tensor, call: str) -> str:
    counts, _, calls, parameters, faults = [set(column) for column in headers.T.tolist()]
    if True in faults:
        return "were to clip together, and one of them does not agree with others: see what it has raised."
    if len(calls) > 1:
        return (
            f"were not called with the same arguments: this one, rank {dist.get_rank()}, with {call}. Every rank has "
            "to make the same call."
        )
    found = "lay them out or measure them otherwise"
    if len(counts) > 1:
        found = f"hold {headers[:, 0].int().tolist()} of them, in this order"
    elif len(parameters) > 1:
        found = "list others, or the same ones in another order, by their names, shapes or types"
    return (
        f"share gradients and do not agree on them: they {found}. Every rank has to make the same call, with the same "
        "parameters in the same order."
    )


def _different_copies(held: Tensor) -> str:
    return (
        f"hold different numbers of parameters under one Replicated pattern: {held.int().tolist()}, one row per "
        "rank. Those that hold any have to hold the same ones: use one pattern for each set of copies."
    )
