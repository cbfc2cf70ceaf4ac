"""Values looked up by index, and values written to places: what each sample looked up is its own.

Which element of the value an element of the output came from is found by looking up the numbers of the elements.
"""

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import engine
from ..layout.owners import MIXED, Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from ..representations.rows import Rows
from .context import RuleContext
from .reductions import along_dims
from .running import by_running, by_slices
from .step import Step
from .table import IDS, OpEntry, add_op


def anywhere(step: Step) -> Owners:
    """Indices decide where a gradient goes."""
    return owners_of_ids(step) if step.position == IDS else step.mixed()


def along_dim(step: Step) -> Owners:
    """Indices decide where a gradient goes along one dimension."""
    return owners_of_ids(step) if step.position == IDS else along_dims(step)


def owners_of_ids(step: Step) -> Owners:
    """Return whose ids were looked up, one row of the output for each; mixed where it is not that."""
    out, shape = step.out, step.shape
    if out.shape[: len(shape)] != shape:
        return Owners.all(MIXED, shape)
    ids = out.mixed(range(len(shape), len(out.shape))).ids
    return Owners(ids.reshape(ids.shape[: len(shape)]), shape)


def index(ctx: RuleContext) -> SampleGrads:
    """``self[indices]``."""
    indices = ctx.saved("indices")
    first = indices[0]
    whole_rows = (
        first is not None
        and first.dtype not in (torch.bool, torch.uint8)
        and not any(i is not None for i in indices[1:])
    )
    return _looked_up(ctx, first if whole_rows else None, lambda cells: cells[_key(indices)])


def index_select(ctx: RuleContext) -> SampleGrads:
    """``self.index_select(dim, index)``."""
    dim, chosen = engine.saved_number(ctx.node, "dim"), ctx.saved("index")
    whole_rows = len(ctx.shape) > 0 and dim % len(ctx.shape) == 0
    return _looked_up(ctx, chosen if whole_rows else None, lambda cells: cells.index_select(dim, chosen))


def gather(ctx: RuleContext) -> SampleGrads:
    """``self.gather(dim, index)``."""
    dim, chosen = engine.saved_number(ctx.node, "dim"), ctx.saved("index")
    return _looked_up(ctx, None, lambda cells: cells.gather(dim, chosen))


def _looked_up(ctx: RuleContext, rows: Tensor | None, look_up: Callable[[Tensor], Tensor]) -> SampleGrads:
    """Hold whole rows of the first dimension where these were looked up by one owner each, else single cells."""
    g = upcast_half(ctx.gradient)
    if rows is not None and g.numel():
        height, width = ctx.shape[0], prod(ctx.shape[1:])
        ids = rows.reshape(-1, 1).long() % height
        with suppress(NotSeparableError):
            found = ctx.layout.by_sample(ids, width).squeeze(2)
            values = ctx.layout.by_sample(g.reshape(len(ids), width), width)
            return Rows(found, values, ctx.shape, table=(height, width))
    cells = look_up(torch.arange(prod(ctx.shape), device=g.device).view(ctx.shape)).reshape(-1, 1)
    ids = ctx.layout.by_sample(cells, 1).squeeze(2)
    values = ctx.layout.by_sample(g.reshape(-1, 1), 1)
    return Rows(ids, values, ctx.shape, table=(prod(ctx.shape), 1))


def index_put(ctx: RuleContext) -> SampleGrads:
    """``self.index_put(indices, values)``: what is left of self, and what was put."""
    key, g = _key(ctx.saved("indices")), upcast_half(ctx.gradient)
    if ctx.position == 0:
        kept = g if ctx.saved("accumulate") else g.clone()
        if kept is not g:
            kept[key] = 0
        return Dense(ctx.layout.sums(kept, ctx.shape))
    owners = ctx.layout.owner_of_each(g.numel(), g.device).view(g.shape)[key]
    layout = SampleLayout(ctx.samples, None, owners.reshape(-1))
    return Dense(layout.sums(g[key], ctx.shape))


def _key(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


add_op("Index", entry=OpEntry(anywhere, ids="indices", by_index=by_slices, rule=index))
add_op("IndexSelect", entry=OpEntry(along_dim, ids="index", by_index=by_slices, rule=index_select))
add_op("Gather", entry=OpEntry(along_dim, ids="index", by_index=by_running, rule=gather))
add_op("IndexAdd", entry=OpEntry(along_dim, by_index=by_slices))
add_op("IndexPut", entry=OpEntry(anywhere, by_index=by_running, rule=index_put))
add_op("IndexCopy", "Scatter", "ScatterAdd", "Sort", "Topk", entry=OpEntry(along_dim, by_index=by_running))
# A stride counts places in memory, and which element lies there is not recorded where the signature of a graph could
# see it.
add_op(
    *("AsStrided", "IndexPutImpl", "MaskedScatter", "MaskedSelect", "Take"),
    entry=OpEntry(anywhere, by_index=by_running),
)
