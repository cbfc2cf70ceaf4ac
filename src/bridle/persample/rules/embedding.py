"""Tables looked up by id: gradients that touch only the rows a sample asked for.

Legend: b sample, t look-up of a sample, v row of the table, d width.
"""

import torch
from torch import Tensor

from ..ownership.layout import Layout, NotSeparableError
from ..representations.base import Piece
from ..representations.rows import Cells, Rows
from .context import Use
from .members import owner_of_rows


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
