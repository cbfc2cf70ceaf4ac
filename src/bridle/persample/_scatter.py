"""Sums of parameters that `fully_shard` has spread: every rank receives its own shard of the sum, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._distributed.collectives import all_reduce_, reduce_scatter
from .._torch.dtensor import spec_of, spread

_WHAT = "per-sample gradients"


def scatter_sums(bucket: Sequence[tuple[str, Tensor]], held: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Add up sums over the ranks of a mesh that each parameter is sharded on in one dimension, and copied in others.

    Args:
        bucket: this rank's sum for each parameter, whole, all of one dtype.
        held: the parameters, all on one mesh with the same placements.

    Returns:
        The sums over all ranks, laid out as their parameters.
    """
    first = held[bucket[0][0]]
    mesh, placements = first.device_mesh, first.placements
    along, dim = next((k, place.dim) for k, place in enumerate(placements) if place.is_shard())
    n, mine = mesh.size(along), mesh.get_local_rank(along)
    widths = [_chunk(total, dim, n) for _, total in bucket]
    sent = bucket[0][1].new_zeros(n, sum(widths))
    for row, chunks in zip(sent, _rows([total for _, total in bucket], dim, n), strict=True):
        for slot, chunk in zip(torch.split(row, widths), chunks, strict=True):
            slot[: chunk.numel()] = chunk.reshape(-1)
    received = _reduced(sent, mesh, along)
    shards = zip(torch.split(received, widths), [total for _, total in bucket], strict=True)
    local = [_shard(slot, total, dim, n, mine) for slot, total in shards]
    return [(name, spread(shard, spec_of(held[name]))) for (name, _), shard in zip(bucket, local, strict=True)]


def is_scattered(parameter: Any) -> bool:
    """Return whether a DTensor is sharded in one dimension of its mesh and copied in the others."""
    kinds = [place for place in parameter.placements if not place.is_replicate()]
    return len(kinds) == 1 and kinds[0].is_shard() and parameter.device_mesh.size() > 1


def _reduced(sent: Tensor, mesh: Any, along: int) -> Tensor:
    real = torch.view_as_real(sent) if sent.is_complex() else sent
    found = reduce_scatter(real, mesh.get_group(along), _WHAT)[0]
    for k in range(mesh.ndim):
        if k != along and mesh.size(k) > 1:
            all_reduce_(found, mesh.get_group(k), _WHAT)
    return torch.view_as_complex(found) if sent.is_complex() else found


def _chunk(total: Tensor, dim: int, n: int) -> int:
    """Return how many elements the largest shard has."""
    size = total.shape[dim]
    return total.numel() // size * -(-size // n) if size else 0


def _rows(totals: Sequence[Tensor], dim: int, n: int) -> list[list[Tensor]]:
    """Return for each rank its shard of each tensor."""
    chunks = [torch.chunk(total, n, dim) for total in totals]
    return [[each[r] if r < len(each) else each[0][:0] for each in chunks] for r in range(n)]


def _shard(slot: Tensor, total: Tensor, dim: int, n: int, mine: int) -> Tensor:
    chunks = torch.chunk(total, n, dim)
    shape = list(total.shape)
    shape[dim] = chunks[mine].shape[dim] if mine < len(chunks) else 0
    return slot[: torch.Size(shape).numel()].view(shape).clone()
