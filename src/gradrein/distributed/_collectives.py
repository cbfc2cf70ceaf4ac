"""Collectives whose failure is a `RankError`. They come before anything is written."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from .._torch.process_group import all_gather_single
from ..errors import RankError

_T = TypeVar("_T")


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
            f"{who} could not exchange {what} with {_members(group)}: {error}\nOne of them has ended, has raised an "
            "error of its own, has not made the same call within the group's timeout, or was called with other "
            "parameters: look at the first error in their logs. No gradient was changed on this rank."
        ) from error


def all_reduce_(values: Tensor, group: Any, what: str, *, largest: bool = False) -> None:
    """Replace values by their sum over the ranks of a process group, or by the largest."""
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    collective(lambda: dist.all_reduce(values, op, group=group), group, what)


def all_gather_rows(sent: Tensor, group: Any, what: str) -> Tensor:
    """Return the rows of every rank of a process group, in the order of ranks, given those of this rank."""
    rows = sent.new_empty(group.size() * len(sent), *sent.shape[1:])
    collective(lambda: all_gather_single(rows, sent, group), group, what)
    return rows


def _members(group: Any) -> str:
    try:
        return f"ranks {dist.get_process_group_ranks(group)}"
    except (RuntimeError, ValueError, KeyError):
        return "the ranks of a process group that was destroyed here"
