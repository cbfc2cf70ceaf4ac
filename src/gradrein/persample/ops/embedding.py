"""Tables looked up by id: gradients that touch only the rows a sample asked for.

Legend: b sample, t look-up of a sample, v row of the table, d width.
"""

import torch
from torch import Tensor

from .. import engine
from ..layout.owners import MIXED, Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import SampleGrads
from ..representations.rows import Rows
from .context import RuleContext
from .indexing import anywhere
from .stacks import owner_of_rows
from .table import IDS, OpEntry, Step, add_op


def embedding(ctx: RuleContext) -> SampleGrads:
    """One look-up per id; the padding id gets nothing, a shared count divides when asked for."""
    ids = ctx.saved("indices").reshape(-1, 1)
    values = ctx.gradient.reshape(len(ids), -1)
    values = _without_padding(ctx, ids, values)
    if ctx.saved("scale_grad_by_freq"):
        counts = torch.bincount(ids.squeeze(1), minlength=ctx.shape[0])
        values = values / counts[ids].to(values)
    layout, width = ctx.layout, ctx.shape[1]
    found = layout.by_sample(ids, width).squeeze(2)
    return Rows(found, layout.by_sample(values, width), ctx.shape, sparse=ctx.saved("sparse"))


def embedding_bag(ctx: RuleContext) -> SampleGrads:
    """Bags that are summed or averaged: each member of a bag gets the bag's gradient, weighted."""
    averaged, largest = 1, 2
    if ctx.position != 0 or ctx.saved("scale_grad_by_freq"):
        raise NotSeparableError
    if ctx.saved("mode") == largest:
        return _largest_of_bags(ctx)
    ids, offsets, g = ctx.saved("indices").reshape(-1), ctx.saved("offsets"), ctx.gradient
    bag = _bag_of_each(offsets, len(g), len(ids))
    values = _without_padding(ctx, ids[:, None], g[bag])
    if ctx.saved("mode") == averaged:
        kept = torch.ones_like(ids, dtype=g.dtype)
        kept = _without_padding(ctx, ids[:, None], kept[:, None]).squeeze(1)
        sizes = g.new_zeros(len(g)).index_add_(0, bag, kept).clamp(min=1)
        values = values / sizes[bag, None]
    weights = ctx.saved("per_sample_weights")
    if weights is not None:
        values = values * weights.reshape(-1, 1)
    owner = owner_of_rows(ctx.layout, g)[bag]
    layout = SampleLayout(ctx.samples, None, owner)
    return Rows(
        layout.by_sample(ids[:, None], 1).squeeze(2),
        layout.by_sample(values, 1),
        ctx.shape,
        sparse=ctx.saved("sparse"),
    )


def _largest_of_bags(ctx: RuleContext) -> SampleGrads:
    """In each column of a bag the gradient goes to the member that was the largest; to nobody in an empty bag."""
    sizes, largest, g = ctx.saved("result2"), ctx.saved("result3"), ctx.gradient
    height, width = ctx.shape
    cells = largest * width + torch.arange(width, device=g.device)
    values = g * (sizes > 0)[:, None]
    ids = ctx.layout.by_sample(cells.reshape(-1, 1), 1).squeeze(2)
    return Rows(ids, ctx.layout.by_sample(values.reshape(-1, 1), 1), ctx.shape, table=(height * width, 1))


def _without_padding(ctx: RuleContext, ids: Tensor, values: Tensor) -> Tensor:
    padding = ctx.saved("padding_idx")
    # -1, which torch hands out as an unsigned number, means there is none.
    return values if not 0 <= padding < ctx.shape[0] else values * (ids != padding)


def _bag_of_each(offsets: Tensor, bags: int, ids: int) -> Tensor:
    """Return the number of the bag that each id is in."""
    starts = offsets[:bags].contiguous()
    return torch.searchsorted(starts, torch.arange(ids, device=offsets.device), right=True) - 1


def into_bags(step: Step) -> Owners:
    """Indices decide where a gradient goes; each id is in one bag, which is a row of the output."""
    if step.position != IDS:
        return step.mixed()
    if len(step.shape) != 1:
        return Owners.all(MIXED, step.shape)
    bag = _bag_of_each(engine.saved(step.node, "offsets").to("cpu"), step.out.shape[0], step.shape[0])
    return step.out.mixed([1]).picked(0, bag).part(1, 0, 1).reshaped(step.shape)


add_op("Embedding", entry=OpEntry(anywhere, ids="indices", rule=embedding))
add_op("EmbeddingBag", entry=OpEntry(into_bags, ids="indices", rule=embedding_bag))
