"""Ranks that do not agree tell each other what they were called with, so that the error can say who differs in what."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError
from .collectives import all_gather_rows
from .meshes import Group

_BYTES = 4096  # of the message of a rank


def disagreement(what: str, fault: str, asked: Mapping[str, Any], compared: Mapping[str, int], group: Group) -> str:
    """Return who of a group differs in what. All of its ranks call this.

    Args:
        what: What was to be exchanged.
        fault: What this rank has found before.
        asked: What must be the same, in words or numbers to be shown; `"the call"` first.
        compared: Fingerprints that must be the same.
        group: The process group.
    """
    ranks = dist.get_process_group_ranks(group.group)
    # Ranks that are at different steps of one call have different things to compare: that comes before any of these.
    asked = {"the call": asked["the call"], "what they compare": ", ".join([*asked, *compared]), **asked}
    mine = [fault, [str(value) for value in asked.values()], [str(n) for n in compared.values()]]
    try:
        rows = [_read(row) for row in all_gather_rows(_written(mine)[None].to(group.device), group.group, what).cpu()]
    except RankError as error:
        return str(error)
    stopped = [(rank, row[0]) for rank, row in zip(ranks, rows, strict=True) if row[0]]
    if stopped:
        rank, why = stopped[0]
        return fault or f"rank {rank}, which shares {what} with ranks {ranks}, has stopped: {why}"
    begin = f"ranks {ranks} do not agree on"
    for k, name in enumerate(asked):
        if len({row[1][k] for row in rows}) > 1:
            return f"{begin} {name}: {_who(ranks, [row[1][k] for row in rows])}. Every rank has to make the same call."
    for k, name in enumerate(compared):
        if len({row[2][k] for row in rows}) > 1:
            odd = _odd_ones(ranks, [row[2][k] for row in rows])
            return (
                f"{begin} {name}: {_some(odd)} differ from the others. Every rank has to make the same call, with the "
                "same parameters in the same order."
            )
    return f"{begin} what they were called with."  # in what is too long to be shown


def _written(told: list[Any]) -> Tensor:
    fault, asked, compared = told
    for length in (600, 300, 150, 75, 35):
        text = json.dumps([fault[:length], [value[:length] for value in asked], compared]).encode()
        if len(text) <= _BYTES:
            break
    return torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)


def _read(row: Tensor) -> list[Any]:
    found: list[Any] = json.loads(bytes(row.tolist()).decode())
    return found


def _who(ranks: list[int], values: list[str]) -> str:
    """Describe which ranks have which value."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_some(those)}" for value, those in by_value.items())


def _odd_ones(ranks: list[int], values: list[str]) -> list[int]:
    usual = max(values, key=values.count)
    return [rank for rank, value in zip(ranks, values, strict=True) if value != usual]


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:20]))}{more}"
