"""Gradients that touch only some rows of a table, or some cells of a value."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tracing import as_one_op
from .base import ALL, Outer, SampleGrads
from .numerics import double, row_norms, scale_rows, upcast_half

if TYPE_CHECKING:
    from typing_extensions import Self


class Rows(SampleGrads):
    """Gradients held as (id, row) pairs; rows of zeros fill up.

    A value that is no table is seen as one: its slices along the first dimension, or its cells, are the rows.
    """

    def __init__(
        self,
        ids: Tensor,
        values: Tensor,
        shape: Sequence[int],
        *,
        table: tuple[int, int] | None = None,
    ) -> None:
        self.ids, self.values = ids.long(), upcast_half(values)
        self.samples, self.shape, self.held_tensors = ids.shape[0], tuple(shape), (self.ids, self.values)
        self.table, self.strategy = (self.shape, "rows") if table is None else (table, "cells")

    def joined(self, others: Sequence["Self"]) -> "Rows | None":
        """Concatenate several look-ups in one table."""
        uses = (self, *others)
        if self.table != self.shape or any(use.table != self.table for use in others):
            return None
        return Rows(torch.cat([use.ids for use in uses], 1), torch.cat([use.values for use in uses], 1), self.shape)

    def cross(self, other: SampleGrads) -> Tensor | None:
        """Return the inner products of a tied table's two uses: look-up, and head with the logits on the left."""
        if not isinstance(other, Outer) or self.table != self.shape:
            return None
        picked = upcast_half(other.left).gather(2, self.ids[:, None, :].expand(-1, other.rows, -1))
        return (double(picked) * (double(upcast_half(other.right)) @ double(self.values).transpose(1, 2))).sum((1, 2))

    def dense(self, part: slice = ALL) -> Tensor:
        ids, values = self.ids[part], self.values[part]
        out = values.new_zeros(len(ids), *self.table)
        return out.scatter_add_(1, ids[..., None].expand(values.shape), values).view(-1, *self.shape)

    def norms(self) -> Tensor:
        rows = self.values.new_zeros(self.ids.numel(), self.table[1])
        places = as_one_op(first_places, torch.empty_like, "Tensor ids")(self.ids)
        rows.index_add_(0, places.reshape(-1), self.values.flatten(0, 1))
        return row_norms(rows.view(self.values.shape))

    def weighted(self, weights: Tensor) -> Tensor:
        rows = scale_rows(self.values, weights).flatten(0, 1)
        return rows.new_zeros(self.table).index_add_(0, self.ids.reshape(-1), rows).view(self.shape)

    def dot(self, direction: Tensor) -> Tensor:
        if self.values.is_complex():
            return super().dot(direction)
        return (direction.to(self.values).reshape(self.table)[self.ids] * self.values).sum((1, 2), dtype=torch.float64)

    def gram(self) -> Tensor:
        used, place = torch.unique(self.ids, return_inverse=True)
        return super(Rows, Rows(place, self.values, (len(used), self.table[1]))).gram()  # of the rows that occur


def first_places(ids: Tensor) -> Tensor:
    """Return for each id of each sample the number of a place that it shares with its equals in that sample alone."""
    (samples, count), ids = ids.shape, ids.contiguous()
    place = torch.searchsorted(ids.sort(1).values, ids)  # the first of its equals, once they are sorted
    return place + torch.arange(samples, device=ids.device)[:, None] * count
