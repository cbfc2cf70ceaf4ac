"""Collectives whose failure is a `RankError`. They come before anything is written."""

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.process_group import all_gather_single, is_gloo, reduce_scatter_single
from ..errors import RankError

_T = TypeVar("_T")
_FEW = 8  # ranks that are told directly: of a short message, each then receives 56 KiB at most
_SHORT = 1024  # float64 values


def collective(run: Callable[[], _T], group: Any, what: str) -> _T:
    """Run a collective of a process group.

    Args:
        run: The collective.
        group: The process group.
        what: What is exchanged, for the error.

    Raises:
        RankError: (a RuntimeError) A rank is gone, late, or made another call.
    """
    try:
        return run()
    except (RuntimeError, ValueError) as error:  # torch raises a ValueError for a group that was destroyed
        who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank, whose process group was destroyed,"
        raise RankError(
            f"{who} could not exchange {what} with {members(group)}: {error}\nOne of them has ended, has raised an "
            "error of its own, has not made the same call within the group's timeout, or was called with other "
            "parameters: look at the first error in their logs. No gradient was changed on this rank."
        ) from error


def members(group: Any) -> str:
    """Return the ranks of a process group, for errors."""
    try:
        return f"ranks {dist.get_process_group_ranks(group)}"
    except (RuntimeError, ValueError, KeyError):
        return "the ranks of a process group that was destroyed here"


def all_gather_rows(sent: Tensor, group: Any, what: str) -> Tensor:
    """Return the rows of every rank of a process group, in the order of ranks, given those of this rank."""
    rows = sent.new_empty(group.size() * len(sent), *sent.shape[1:])
    collective(lambda: all_gather_single(rows, sent, group), group, what)
    return rows


def all_reduce_(values: Tensor, group: Any, what: str, *, largest: bool = False) -> None:
    """Replace values by their sum over the ranks of a process group, or by the largest.

    The all-reduce of gloo passes even a short message around in 4 (n - 1) pieces per rank, each of which waits for one
    of another rank. Among few ranks each sends it to each instead: n - 1 pieces that wait for nothing.
    """
    if _is_short(values) and group.size() <= _FEW and is_gloo(group, values.device):
        _exchange(values, group, what, torch.maximum if largest else torch.add)
    else:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        collective(lambda: dist.all_reduce(values, op, group=group), group, what)


def _is_short(values: Tensor) -> bool:
    return values.dtype == torch.float64 and values.dim() == 1 and len(values) <= _SHORT


def _exchange(values: Tensor, group: Any, what: str, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace values by what those of all ranks come to, in the order of ranks: the same bits on each of them."""
    n = group.size()
    rows = values.new_empty(n * len(values))
    collective(lambda: dist.all_to_all_single(rows, values.repeat(n), group=group), group, what)
    values.copy_(reduce(combine, rows.view(n, -1)))


def reduce_scatter(rows: Tensor, group: Any, what: str) -> Tensor:
    """Return this rank's row of the sum over the ranks of a process group, given a row for each, in their order."""
    found = rows.new_empty(1, *rows.shape[1:])
    collective(lambda: reduce_scatter_single(found, rows, group), group, what)
    return found
