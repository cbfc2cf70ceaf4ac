"""Sums of parameters that are spread: every rank receives its own shard of the sum, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.collectives import all_reduce_, reduce_scatter
from .._torch.dtensor import distribute_own, is_dtensor, spec_of, spread

_WHAT = "per-sample gradients"


class Scattered(NamedTuple):
    """How samples' ranks share a parameter that is sharded over them in one dimension, and copied in others.

    Attributes:
        mesh: the mesh that the parameter lies on.
        data_dims: how many of its dimensions, the first ones, are of ranks with different samples.
        along: the one of them that it is sharded along.
        dim: the dimension of the parameter that is sharded.
    """

    mesh: Any
    data_dims: int
    along: int
    dim: int


class Layout(NamedTuple):
    """How a parameter lies.

    Attributes:
        held: as the optimizer holds it.
        leaf: as the graph ends in it: what tensor parallelism leaves to each rank, gathered over the samples' ranks.
    """

    held: Any
    leaf: Any

    @property
    def scattered(self) -> Scattered | None:
        """How a sum is scattered over the samples' ranks; None if each of them keeps all of it."""
        if not is_dtensor(self.held):
            return None
        mesh = self.held.device_mesh
        count = mesh.ndim - (self.leaf.device_mesh.ndim if is_dtensor(self.leaf) else 0)
        cut = [(i, place) for i, place in enumerate(self.held.placements[:count]) if not place.is_replicate()]
        if len(cut) != 1 or cut[0][1].is_partial() or mesh.size() == 1:
            return None
        return Scattered(mesh, count, cut[0][0], cut[0][1].dim)

    def lay_out(self, total: Tensor) -> Tensor:
        """Return a sum that all of the samples' ranks have, as the optimizer's parameter lies."""
        if not is_dtensor(self.held):
            return total
        if is_dtensor(self.leaf):
            return spread(total, spec_of(self.held))
        laid_out: Tensor = distribute_own(total, self.held.device_mesh, self.held.placements)
        return laid_out


def scatter_sums(
    bucket: Sequence[tuple[str, Tensor]], held: Mapping[str, Layout], how: Scattered
) -> list[tuple[str, Tensor]]:
    """Add up sums over the samples' ranks.

    Args:
        bucket: this rank's sum for each parameter, as the graph ends in it, all of one dtype.
        held: how the parameters lie.
        how: how all of them are scattered.

    Returns:
        The sums over all ranks, laid out as their parameters.
    """
    dim, n, mine = how.dim, how.mesh.size(how.along), how.mesh.get_local_rank(how.along)
    widths = [_chunk(total, dim, n) for _, total in bucket]
    sent = bucket[0][1].new_zeros(n, sum(widths))
    for row, chunks in zip(sent, _rows([total for _, total in bucket], dim, n), strict=True):
        for slot, chunk in zip(torch.split(row, widths), chunks, strict=True):
            slot[: chunk.numel()] = chunk.reshape(-1)
    received = _reduced(sent, how)
    shards = zip(torch.split(received, widths), [total for _, total in bucket], strict=True)
    local = [_shard(slot, total, dim, n, mine) for slot, total in shards]
    return [(name, spread(shard, spec_of(held[name].held))) for (name, _), shard in zip(bucket, local, strict=True)]


def _reduced(sent: Tensor, how: Scattered) -> Tensor:
    real = torch.view_as_real(sent) if sent.is_complex() else sent
    found = reduce_scatter(real, how.mesh.get_group(how.along), _WHAT)[0]
    for k in range(how.data_dims):
        if k != how.along and how.mesh.size(k) > 1:
            all_reduce_(found, how.mesh.get_group(k), _WHAT)
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
