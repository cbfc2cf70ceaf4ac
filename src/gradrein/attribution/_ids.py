"""The ids of samples."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError


def read_ids(ids: Iterable[int] | Tensor) -> Tensor:
    """Return ids as int64; refuse what is no list of whole numbers."""
    given: Any = ids
    try:
        found = torch.as_tensor(given if isinstance(ids, Tensor) or hasattr(ids, "__array__") else list(ids)).detach()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(())  # refused below
    found = found.long() if not found.numel() else found
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise ArgumentTypeError(
            f"ids: expected a whole number for each sample, found {given!r:.80}. For samples with other names, keep a "
            "list of these and pass positions in it."
        )
    return found.to("cpu", torch.int64).contiguous()


def refuse_known(ids: Tensor, known: set[int]) -> None:
    """Refuse ids that are known, or that occur twice."""
    unique, counts = torch.unique(ids, return_counts=True)
    twice, there = unique[counts > 1].tolist(), [i for i in ids.tolist() if i in known]
    if twice:
        raise ArgumentError(f"ids: {twice[0]} occurs twice ({len(twice)} ids do). Pass each sample once.")
    if there:
        raise ArgumentError(
            f"ids: {there[0]} is in the store already ({len(there)} of {len(ids)} are). Add each sample once: "
            "store.resume(ids) returns those that are still to be added."
        )
