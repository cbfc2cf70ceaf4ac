"""Values looked up by index, and values written to places: what each sample looked up is its own.

Which element of the value an element of the output came from is found by looking up the numbers of the elements.
Legend of tables: b sample, t look-up of a sample, v row of the table, d width.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..._torch.saved import kind_of
from ..._torch.storage import is_fake
from .. import engine
from ..layout import MIXED, UNREACHED, NotSeparableError, Owners
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from ..representations.rows import Rows
from .reductions import along_dims
from .rules import RuleContext
from .table import IDS, OpEntry, Step, add_op


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
    dim, chosen = engine.saved(ctx.node, "dim"), ctx.saved("index")
    whole_rows = len(ctx.shape) > 0 and dim % len(ctx.shape) == 0
    return _looked_up(ctx, chosen if whole_rows else None, lambda cells: cells.index_select(dim, chosen))


def gather(ctx: RuleContext) -> SampleGrads:
    """``self.gather(dim, index)``."""
    dim, chosen = engine.saved(ctx.node, "dim"), ctx.saved("index")
    return _looked_up(ctx, None, lambda cells: cells.gather(dim, chosen))


def _looked_up(ctx: RuleContext, rows: Tensor | None, look_up: Callable[[Tensor], Tensor]) -> SampleGrads:
    """Hold whole rows of the first dimension where these were looked up by one owner each, else single cells."""
    g = upcast_half(ctx.gradient)
    if rows is not None and g.numel():
        height, width = ctx.shape[0], prod(ctx.shape[1:])
        ids = rows.reshape(-1, 1).to(g.device, torch.long) % height  # indices may lie on the host
        with suppress(NotSeparableError):
            places = ctx.layout.by_sample(ids, width).squeeze(2)
            values = ctx.layout.by_sample(g.reshape(len(ids), width), width)
            return Rows(places, values, ctx.shape, table=(height, width))
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
    owners = ctx.layout.each(g.device)[key].to("cpu")
    return Dense(Owners(owners, tuple(owners.shape), ctx.samples).sums(g[key], ctx.shape))


def _key(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


def by_running(step: Step) -> Owners:
    """Run the node on ones, on the owners and on their squares, in its own dtype: it only moves and adds.

    The owners that meet in an element are one and the same exactly when their variance is zero. Where squares are too
    large to be added without rounding, or sums are not whole, each binary digit has to be set in all or in none.
    """
    ids = step.out.ids
    count = _moved(step, ids != UNREACHED)
    if count is None or not prod(step.out.shape):
        return step.mixed()
    if not count.numel():
        return Owners.all(UNREACHED, step.shape)
    eps, largest = torch.finfo(count.dtype).eps, max(int(ids.max()), 0)
    one, owner = count.abs() * eps < 1, torch.zeros_like(count, dtype=torch.int32)
    if not step.out.is_proved:
        one &= _moved(step, ids == MIXED) == 0
    if bool(((count >= 0) & (count == count.round())).all()) and float(count.max()) * largest**2 * eps < 1:
        known = ids.clamp(min=0)
        total, squares = _moved(step, known), _moved(step, known * known)
        assert total is not None
        assert squares is not None
        one &= squares.double() * count == total.double().square()
        owner = (total / count.clamp(min=1)).int()
    else:
        for digit in range(largest.bit_length()):
            set_here = _moved(step, (ids >= 0) & (ids >> digit & 1 == 1))
            assert set_here is not None
            all_set = set_here == count
            one &= all_set | (set_here == 0)
            owner += all_set.int() << digit
    return Owners.of(torch.where(count == 0, UNREACHED, torch.where(one, owner, MIXED)).to(torch.int32), step.shape)


def _moved(step: Step, numbers: Tensor) -> Tensor | None:
    """Return what the node makes of numbers, one for each element of its output; None if it sends no gradient."""
    info = graph.describe(step.node)[0]
    wide = numbers.to(info.device, info.dtype).expand(step.out.shape).contiguous()
    sent = engine.call(step.node, [wide])[step.position]
    if sent is None:
        return None
    return (sent.to_dense() if sent.is_sparse else sent).real.to("cpu")


def by_slices(step: Step) -> Owners:
    """Return the owners of an input of an op that moves whole slices along one dimension; run it where it does more."""
    adds = hasattr(step.node, "_saved_alpha")  # to an input, at the index: `index_add`
    dim, index = _moved_slices(step, step.out.shape if adds else step.shape)
    if index is None:
        return by_running(step)
    if not adds:
        return step.out.collected(dim, index, step.shape)
    return step.out if step.position == 0 else step.out.picked(dim, index)


def _moved_slices(step: Step, whole: tuple[int, ...]) -> tuple[int, Tensor | None]:
    """Return the dimension and the index of the slices that an op moves; no index if it does anything else.

    Args:
        step: the op.
        whole: the shape of what the index counts in.
    """
    if hasattr(step.node, "_saved_dim"):
        dim, index = engine.saved(step.node, "dim"), engine.saved(step.node, "index")
    else:
        given = [(i, one) for i, one in enumerate(engine.saved(step.node, "indices")) if one is not None]
        dim, index = given[0] if len(given) == 1 else (0, None)
    if type(index) is not Tensor or is_fake(index) or index.dtype not in (torch.int64, torch.int32):
        return 0, None
    count = len(step.shape)
    if index.dim() != 1 or not count or len(step.out.shape) != count:
        return 0, None
    return dim % count, index.to("cpu", torch.int64) % max(1, whole[dim])


def by_places(step: Step) -> Owners:
    """Return the owners of an input of a write into a part of a tensor: torch says nowhere into which part.

    Random numbers as a gradient show what stays in its place, which is all of the tensor that is written into, but for
    the part. The numbers of places then show where all else comes from. What the op computes besides mixes.
    """
    info, count = graph.describe(step.node)[0], prod(step.out.shape)
    if info.dtype not in (torch.float32, torch.float64) or count * torch.finfo(info.dtype).eps >= 1:
        return step.mixed()
    random = _random(count, info.dtype, 3).view(step.out.shape)
    moved = engine.call(step.node, [random.to(info.device)])[step.position]
    if moved is None or moved.shape != step.shape:
        return step.mixed()
    moved = moved.to("cpu")
    if moved.shape == random.shape and bool(((moved == random) | (moved == 0)).all()):
        return step.out
    numbers = torch.arange(1, count + 1, dtype=info.dtype, device=info.device).view(step.out.shape)
    places = engine.call(step.node, [numbers])[step.position]
    assert places is not None
    index = places.to("cpu").clamp(0, count).long()
    if not bool((torch.where(index > 0, random.view(-1)[index - 1], 0) == moved).all()):
        return step.mixed()
    owners = step.out.ids.expand(step.out.shape).reshape(-1)
    return Owners.of(torch.where(index > 0, owners[index - 1], UNREACHED), step.shape)


# An index with more numbers than the first is not kept for the next step, nor are more random ones than the second.
_KEPT, _KEPT_RANDOM = 1 << 16, 1 << 22


def _random(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (_kept_random if count <= _KEPT_RANDOM else _kept_random.__wrapped__)(count, dtype, seed)


@lru_cache(maxsize=8)
def _kept_random(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    return 1 + torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")


def moved_by(nodes: Iterable[Node]) -> Tensor:
    """Return what `by_index` follows of some ops and the signature of their graph does not hold, as one vector.

    While it is the same, so is what follows from it. It has NaN, which equals nothing, for what cannot be told.
    """
    parts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    for node in nodes:
        found = [_unknown()] if engine.is_packed(node) else _indices(node) or _sums(node)
        parts += [one.detach().reshape(-1).to("cpu", torch.float64) for one in found]
    return torch.cat(parts)


def _indices(node: Node) -> list[Tensor]:
    """Return the indices and masks of an op; numbers that it keeps besides are moved, and move nothing."""
    saved = [engine.saved(node, name.removeprefix("_raw_saved_")) for name in kind_of(node).tensors]
    flat = [x for one in saved for x in (one if isinstance(one, tuple | list) else (one,))]
    kept = [x for x in flat if x is not None and not (x.is_floating_point() or x.is_complex())]
    if any(type(x) is not Tensor or is_fake(x) or x.numel() > _KEPT for x in kept):
        return [_unknown()]
    forms = [
        torch.tensor([-1] if x is None else [x.dim(), *x.shape, x.dtype in (torch.bool, torch.uint8)], device="cpu")
        for x in flat
    ]
    return [*forms, *kept]


def _sums(node: Node) -> list[Tensor]:
    """Return a number for each input, of an op that keeps no index: random numbers times what it makes of others.

    It moves and adds, which is linear: two that move otherwise have other numbers, but by a chance of one in millions.
    """
    info = graph.describe(node)[0]
    if info.dtype not in (torch.float32, torch.float64):
        return [_unknown()]
    random = _random(prod(info.shape), info.dtype, 3).view(info.shape)
    sent = [x for x in engine.call(node, [random.to(info.device)]) if x is not None]
    return [(x.to("cpu", torch.float64) * _random(x.numel(), torch.float64, 4).view(x.shape)).sum() for x in sent]


def _unknown() -> Tensor:
    return torch.full((), torch.nan, device="cpu")


add_op("Index", entry=OpEntry(anywhere, ids="indices", by_index=by_slices, rule=index))
add_op("IndexSelect", entry=OpEntry(along_dim, ids="index", by_index=by_slices, rule=index_select))
add_op("Gather", entry=OpEntry(along_dim, ids="index", by_index=by_running, rule=gather))
add_op("IndexAdd", entry=OpEntry(along_dim, by_index=by_slices))
add_op("IndexPut", entry=OpEntry(anywhere, by_index=by_running, rule=index_put))
add_op("IndexCopy", "Scatter", "ScatterAdd", "Sort", "Topk", entry=OpEntry(along_dim, by_index=by_running))
add_op("CopySlices", entry=OpEntry(Step.mixed, by_index=by_places))
# A stride counts places in memory, and which element lies there is not recorded where the signature of a graph could
# see it.
add_op(
    *("AsStrided", "IndexPutImpl", "MaskedScatter", "MaskedSelect", "Take"),
    entry=OpEntry(anywhere, by_index=by_running),
)


def embedding(ctx: RuleContext) -> SampleGrads:
    """One look-up per id; the padding id gets nothing, a shared count divides when asked for."""
    ids = ctx.saved("indices").reshape(-1, 1)
    values = ctx.gradient.reshape(len(ids), -1)
    values = _without_padding(ctx, ids, values)
    if ctx.saved("scale_grad_by_freq"):
        counts = torch.bincount(ids.squeeze(1), minlength=ctx.shape[0])
        values = values / counts[ids].to(values)
    layout, width = ctx.layout, ctx.shape[1]
    places = layout.by_sample(ids, width).squeeze(2)
    return Rows(places, layout.by_sample(values, width), ctx.shape)


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
    layout = Owners.of_rows(ctx.layout.along([0], g.device)[bag], ctx.samples)
    return Rows(layout.by_sample(ids[:, None], 1).squeeze(2), layout.by_sample(values, 1), ctx.shape)


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
