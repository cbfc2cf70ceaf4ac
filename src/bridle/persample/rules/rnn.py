"""The fused LSTM layer of the CPU: gates computed again in one product, their gradients by one sweep.

Legend: n column of the batch, t time, h hidden, i input width. Batch comes first here, whatever the layer was told.
The gates come in the order in, forget, cell, out, each of width h, as in the weights.
"""

import torch
from torch import Tensor

from ..ownership.layout import NotSeparableError, SampleLayout
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from ..representations.outer import Outer
from ..tracing import structure
from .context import RuleContext
from .registry import rule

_WEIGHT_IH, _WEIGHT_HH = 1, 2


@rule("MkldnnRnnLayerBackward0", all_outputs=True)
def lstm(ctx: RuleContext) -> SampleGrads:
    """Input weight, hidden weight and the two biases, at positions 1 to 4."""
    if ctx.position not in (1, 2, 3, 4) or ctx.saved("batch_sizes"):
        raise NotSeparableError
    key = "gate gradients"
    if key not in ctx._cache:  # the weights and biases of a layer are four uses of one node
        with structure():
            columns = _owner_of_columns(ctx)
        deltas, before = (_by_sample(columns, x) for x in _gate_gradients(ctx))
        ctx._cache[key] = columns, deltas, before, deltas.sum(1)
    columns, deltas, before, bias = ctx._cache[key]
    if ctx.position == _WEIGHT_IH:
        return Outer(deltas, _by_sample(columns, _in_order(ctx, ctx.saved("input"))))
    if ctx.position == _WEIGHT_HH:
        return Outer(deltas, before)
    return Dense(bias)


def _owner_of_columns(ctx: RuleContext) -> SampleLayout:
    """Find who owns each column: it is the same at all times, also where the gradient is zero."""
    owner: Tensor | None = None
    for g, layout in zip(ctx.gradients[:3], ctx.layouts[:3], strict=True):
        if g is not None:
            found = _columns_of(g, layout)
            owner = found if owner is None else torch.maximum(owner, found)
    assert owner is not None
    if torch.equal(owner, torch.arange(ctx.samples, device=owner.device)):
        return SampleLayout(ctx.samples, 1, None)  # the usual order needs no sorting
    return SampleLayout(ctx.samples, None, owner)


def _columns_of(g: Tensor, layout: SampleLayout) -> Tensor:
    columns, width = g.shape[-2:]
    by_shape = layout.is_whole_along(1, width) and layout.is_whole_along(
        columns * width, g.numel() // (columns * width)
    )
    if by_shape and layout.block is not None:
        return (
            torch.arange(columns, device=g.device).mul(width).div(layout.block, rounding_mode="floor") % layout.samples
        )
    each = layout.owner_of_each(g.numel(), g.device).view(-1, columns, width)
    has_gradient = g.view(each.shape) != 0
    most = torch.where(has_gradient, each, -1).amax((0, 2))
    if not bool(((each == most[:, None]) | ~has_gradient).all()):
        raise NotSeparableError
    return most


def _by_sample(columns: SampleLayout, x: Tensor) -> Tensor:
    """Return (column, time, width) as (samples, rows, width)."""
    _, time, width = x.shape
    rows = columns.by_sample(x.flatten(1), 1)
    return rows.reshape(columns.samples, -1, width) if time else rows


def _in_order(ctx: RuleContext, x: Tensor) -> Tensor:
    """Return (time, column, width) as (column, time, width), steps in the order in which the layer took them."""
    return upcast_half(x.flip(0) if ctx.saved("reverse") else x).transpose(0, 1)


def _gate_gradients(ctx: RuleContext) -> tuple[Tensor, Tensor]:
    """Return the gradient at every gate before its nonlinearity, and the hidden state before every step."""
    out = _in_order(ctx, ctx.saved("result0"))
    first = upcast_half(ctx.saved("hx_")).reshape(-1, 1, out.shape[-1])
    before = torch.cat([first, out[:, :-1]], 1)
    gates = _gates(ctx, before)
    i, f, c, o = gates.unbind(2)
    cells = torch.empty(out.shape[0], out.shape[1] + 1, out.shape[2], dtype=out.dtype, device=out.device)
    cells[:, 0] = upcast_half(ctx.saved("cx_")).reshape(-1, out.shape[-1])
    for t in range(out.shape[1]):
        torch.addcmul(f[:, t] * cells[:, t], i[:, t], c[:, t], out=cells[:, t + 1])
    cell_before, cell = cells[:, :-1], cells[:, 1:].tanh()
    # Everything but the running gradients of hidden state and cell is known for all steps at once.
    slopes = torch.empty_like(gates)
    torch.addcmul(i, i, i, value=-1, out=slopes[:, :, 0]).mul_(c)
    torch.addcmul(f, f, f, value=-1, out=slopes[:, :, 1]).mul_(cell_before)
    torch.addcmul(i, i, c.square(), value=-1, out=slopes[:, :, 2])
    torch.addcmul(o, o, o, value=-1, out=slopes[:, :, 3]).mul_(cell)
    to_cell = torch.addcmul(o, o, cell.square_(), value=-1)
    return _swept(ctx, slopes, to_cell, f), before


def _gates(ctx: RuleContext, before: Tensor) -> Tensor:
    """Return what came out of the gates: (column, time, gate, h)."""
    w_ih, w_hh, b_ih, b_hh = (upcast_half(ctx.saved(f"weight{i}")) for i in range(4))
    columns, time, width = before.shape
    flat = _in_order(ctx, ctx.saved("input")).reshape(columns * time, w_ih.shape[1]) @ w_ih.T
    if b_ih.dim() == 1:  # a layer without biases has zeros in the shape of its weights in their places
        flat += b_ih + b_hh
    gates = flat.addmm_(before.flatten(0, 1), w_hh.T).view(columns, time, 4, width)
    gates[:, :, :2].sigmoid_()
    gates[:, :, 2].tanh_()
    gates[:, :, 3].sigmoid_()
    return gates


def _swept(ctx: RuleContext, slopes: Tensor, to_cell: Tensor, forget: Tensor) -> Tensor:
    """Go back in time and multiply the slopes of the gates by the gradients that arrive, in place."""
    w_hh = upcast_half(ctx.saved("weight1"))
    g_out, g_hidden, g_cell = ctx.gradients[:3]
    columns, time, width = forget.shape
    d_hidden, d_cell = (
        forget.new_zeros(columns, width) if g is None else upcast_half(g).reshape(columns, width).clone()
        for g in (g_hidden, g_cell)
    )
    g_steps = None if g_out is None else _in_order(ctx, g_out)
    for t in reversed(range(time)):
        if g_steps is not None:
            d_hidden += g_steps[:, t]
        d_cell.addcmul_(d_hidden, to_cell[:, t])
        step = slopes[:, t]
        step[:, :3] *= d_cell[:, None]
        step[:, 3] *= d_hidden
        d_cell *= forget[:, t]
        torch.mm(step.flatten(1), w_hh, out=d_hidden)
    return slopes.flatten(2)
