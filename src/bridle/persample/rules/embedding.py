"""Tables looked up by id: gradients that touch only the rows a sample asked for.

Legend: b sample, t look-up of a sample, v row of the table, d width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._grams import Grams
from .._numbers import double, lengths_of, square, weighed, wide
from .._owners import Layout, NotSeparableError
from .._pieces import ALL, Piece
from .._use import Use
from .linear import Outer
from .members import owner_of_rows


class Rows(Piece):
    """Gradients held as (id, row) pairs; rows of zeros fill up."""

    how = "rows"

    def __init__(self, ids: Tensor, values: Tensor, table: Sequence[int], *, sparse: bool = False) -> None:
        self.ids, self.values, self.sparse = ids, wide(values), sparse
        self.samples, self.shape = ids.shape[0], tuple(table)

    @staticmethod
    def joined(pieces: Sequence["Rows"]) -> "Rows":
        """Put several look-ups in one table behind each other."""
        return Rows(
            torch.cat([piece.ids for piece in pieces], 1),
            torch.cat([piece.values for piece in pieces], 1),
            pieces[0].shape,
            sparse=all(piece.sparse for piece in pieces),
        )

    def dense(self, part: slice = ALL) -> Tensor:  # noqa: D102
        ids, values = self.ids[part], self.values[part]
        out = values.new_zeros(len(ids), *self.shape)
        return out.scatter_add_(1, ids[..., None].expand(values.shape), values)

    def squared_norms(self, grams: Grams | None = None) -> Tensor:  # noqa: D102, ARG002
        owner = torch.arange(self.samples, device=self.ids.device)[:, None]
        keys, place = torch.unique(self.ids + owner * self.shape[0], return_inverse=True)
        rows = self.values.new_zeros(len(keys), self.shape[1])
        rows.index_add_(0, place.reshape(-1), self.values.flatten(0, 1))
        squares = square(lengths_of(rows))
        out = squares.new_zeros(self.samples)
        return out.index_add_(0, keys.div(self.shape[0], rounding_mode="floor"), squares)

    def weighted(self, weights: Tensor) -> Tensor:  # noqa: D102
        rows = weighed(self.values, weights).flatten(0, 1)
        if self.sparse:
            return torch.sparse_coo_tensor(self.ids.reshape(1, -1), rows, self.shape, check_invariants=False)
        return rows.new_zeros(self.shape).index_add_(0, self.ids.reshape(-1), rows)

    def dot(self, direction: Tensor) -> Tensor:  # noqa: D102
        if self.values.is_complex():
            return super().dot(direction)
        return (direction.to(self.values)[self.ids] * self.values).sum((1, 2), dtype=torch.float64)

    def holds(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.ids, self.values

    def gram(self) -> Tensor:  # noqa: D102
        used, place = torch.unique(self.ids, return_inverse=True)
        return Rows(place, self.values, (len(used), self.shape[1])).as_dense_gram()

    def as_dense_gram(self) -> Tensor:
        """Return the inner products from written-down gradients of the rows that occur."""
        return super().gram()


class Cells(Piece):
    """The gradients of a value of any shape, held as rows of a table with as many cells."""

    how = "cells"

    def __init__(self, cells: Rows, table: Sequence[int]) -> None:
        self.cells, self.samples, self.shape = cells, cells.samples, tuple(table)

    def dense(self, part: slice = ALL) -> Tensor:  # noqa: D102
        return self.cells.dense(part).view(-1, *self.shape)

    def squared_norms(self, grams: Grams | None = None) -> Tensor:  # noqa: D102, ARG002
        return self.cells.squared_norms()

    def weighted(self, weights: Tensor) -> Tensor:  # noqa: D102
        return self.cells.weighted(weights).view(self.shape)

    def dot(self, direction: Tensor) -> Tensor:  # noqa: D102
        return self.cells.dot(direction.reshape(self.cells.shape))

    def gram(self) -> Tensor:  # noqa: D102
        return self.cells.gram()

    def holds(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.cells.holds()


def rows_with_outer(rows: Rows, outer: Outer) -> Tensor:
    """Return the inner products of a tied table's two uses: look-up, and head with left the logits' side."""
    logits, hidden = wide(outer.left), wide(outer.right)
    picked = logits.gather(2, rows.ids[:, None, :].expand(-1, logits.shape[1], -1))
    return (double(picked) * (double(hidden) @ double(rows.values).transpose(1, 2))).sum((1, 2))


def embedding(use: Use) -> Piece:
    """One look-up per id; the padding id gets nothing, a shared count divides when asked for."""
    ids = use.saved("indices").reshape(-1, 1)
    values = use.gradient.reshape(len(ids), -1)
    values = _without_padding(use, ids, values)
    if use.saved("scale_grad_by_freq"):
        counts = torch.bincount(ids.squeeze(1), minlength=use.shape[0])
        values = values / counts[ids].to(values)
    layout, width = use.layout, use.shape[1]
    found = layout.by_sample(ids, width).squeeze(2)
    return Rows(found, layout.by_sample(values, width), use.shape, sparse=use.saved("sparse"))


def embedding_bag(use: Use) -> Piece:
    """Bags that are summed or averaged: each member of a bag gets the bag's gradient, weighted."""
    averaged, largest = 1, 2
    if use.position != 0 or use.saved("scale_grad_by_freq"):
        raise NotSeparableError
    if use.saved("mode") == largest:
        return _largest_of_bags(use)
    ids, offsets, g = use.saved("indices").reshape(-1), use.saved("offsets"), use.gradient
    starts = offsets[: len(g)].contiguous()
    bag = torch.searchsorted(starts, torch.arange(len(ids), device=ids.device), right=True) - 1
    values = _without_padding(use, ids[:, None], g[bag])
    if use.saved("mode") == averaged:
        kept = torch.ones_like(ids, dtype=g.dtype)
        kept = _without_padding(use, ids[:, None], kept[:, None]).squeeze(1)
        sizes = g.new_zeros(len(g)).index_add_(0, bag, kept).clamp(min=1)
        values = values / sizes[bag, None]
    weights = use.saved("per_sample_weights")
    if weights is not None:
        values = values * weights.reshape(-1, 1)
    owner = owner_of_rows(use.layout, g)[bag]
    layout = Layout(use.samples, None, owner)
    return Rows(
        layout.by_sample(ids[:, None], 1).squeeze(2),
        layout.by_sample(values, 1),
        use.shape,
        sparse=use.saved("sparse"),
    )


def _largest_of_bags(use: Use) -> Piece:
    """In each column of a bag the gradient goes to the member that was the largest; to nobody in an empty bag."""
    sizes, largest, g = use.saved("result2"), use.saved("result3"), use.gradient
    height, width = use.shape
    cells = largest * width + torch.arange(width, device=g.device)
    values = g * (sizes > 0)[:, None]
    ids = use.layout.by_sample(cells.reshape(-1, 1), 1).squeeze(2)
    return Cells(Rows(ids, use.layout.by_sample(values.reshape(-1, 1), 1), (height * width, 1)), use.shape)


def _without_padding(use: Use, ids: Tensor, values: Tensor) -> Tensor:
    padding = use.saved("padding_idx")
    # -1, which torch hands out as an unsigned number, means there is none.
    return values if not 0 <= padding < use.shape[0] else values * (ids != padding)
