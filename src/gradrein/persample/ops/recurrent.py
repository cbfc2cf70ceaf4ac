"""The fused LSTM layer of the CPU: its gates computed again in one product; their gradients by one sweep.

Legend: n column of the batch, t time, h hidden, i input width. Time comes first here, whatever the layer was told.
The gates come in the order in, forget, cell, out, each of width h, as in the weights.
"""

from typing import Any

import torch
from torch import Tensor

from ..layout.owners import UNREACHED, Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from ..representations.outer import Outer
from ..tracing import as_one_op, structure
from .context import RuleContext
from .stacks import common_owner
from .step import Step
from .table import OpEntry, add_op, base_name

_WEIGHT_IH, _WEIGHT_HH = 1, 2
# At which positions, counted from the first input or from the last, each layer has its states.
_STATES = {"MkldnnRnnLayer": (5, 6), "CudnnRnn": (-2, -1), "MiopenRnn": (-2, -1), "LstmMps": (1, 2)}
_ARGUMENTS = (
    "Tensor x, Tensor before, Tensor cell, Tensor g_steps, Tensor g_hidden, Tensor g_cell, "
    "Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh"
)
aten = torch.ops.aten


def by_column(step: Step) -> Owners:
    """(time, batch, features), and states with the batch next to last: columns of the batch stay apart."""
    name, count = base_name(step.node), len(step.node.next_functions)
    is_state = step.position in [at % count for at in _STATES[name]]
    if step.position and not is_state:
        return step.mixed()  # weights get everything
    batch = 0 if step.value("batch_first") and name != "MkldnnRnnLayer" else -2
    packed = step.value("batch_sizes")  # of sequences of different lengths: how many there are at each time
    column_of = torch.cat([torch.arange(n, device="cpu") for n in packed]) if packed else None
    columns = packed[0] if packed else step.out.shape[batch]
    owners = Owners.all(UNREACHED, (columns,))
    for number, out in enumerate(step.outs):
        if not out.is_empty:
            owners = owners.merged(
                _owners_of_columns(out, -2 if number else batch, None if number else column_of, columns)
            )
    if column_of is not None and not is_state:
        return Owners(owners.picked(0, column_of).ids[:, None], step.shape)
    sizes = [1] * len(step.shape)
    sizes[-2 if is_state else batch] = -1
    return Owners(owners.ids.reshape(sizes), step.shape)


def _owners_of_columns(out: Owners, batch: int, column_of: Tensor | None, columns: int) -> Owners:
    """Return who owns each column of the batch, given a dimension of an output or the column of each of its rows."""
    batch = 0 if column_of is not None else batch % len(out.shape)
    apart = out.mixed(dim for dim in range(len(out.shape)) if dim != batch)
    line = Owners(apart.ids.reshape(-1), (out.shape[batch],))
    return line if column_of is None else line.collected(0, column_of, (columns,))


def by_row(step: Step) -> Owners:
    """One step of a cell, (batch, gates) and (batch, features): rows stay apart, biases get everything."""
    if step.position > 2:
        return step.mixed()
    owners = [out.mixed([1]).part(1, 0, 1) for out in step.outs if not out.is_empty]
    row = owners[0]
    for other in owners[1:]:
        row = row.merged(other)
    return Owners(row.ids, step.shape)


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
    times = g.numel() // (columns * width)
    if layout.block is not None and layout.is_whole_along(1, width) and layout.is_whole_along(columns * width, times):
        first = torch.arange(columns, device=g.device) * width
        return first.div(layout.block, rounding_mode="floor") % layout.samples
    each = layout.owner_of_each(g.numel(), g.device).view(-1, columns, width)
    return common_owner(each.transpose(0, 1).flatten(1))


def _by_sample(columns: SampleLayout, x: Tensor) -> Tensor:
    """Return (time, column, width) as (samples, rows, width)."""
    time, _, width = x.shape
    rows = x.transpose(0, 1)
    if columns.block == 1:
        return rows  # a column is a sample
    rows = columns.by_sample(rows.flatten(1), 1)
    return rows.reshape(columns.samples, -1, width) if time else rows


def _in_order(ctx: RuleContext, x: Tensor) -> Tensor:
    """Return (time, column, width) with the steps in the order in which the layer took them."""
    return upcast_half(x.flip(0) if ctx.saved("reverse") else x)


def _gate_gradients(ctx: RuleContext) -> tuple[Tensor, Tensor]:
    """Return the gradient at every gate before its nonlinearity, and the hidden state before every step."""
    out = _in_order(ctx, ctx.saved("result0"))
    first, cell = (upcast_half(ctx.saved(name)).reshape(1, -1, out.shape[-1]) for name in ("hx_", "cx_"))
    before = torch.cat([first, out[:-1]])
    g_out, *g_last = ctx.gradients[:3]
    g_steps = torch.zeros_like(out) if g_out is None else _in_order(ctx, g_out)
    g_hidden, g_cell = (torch.zeros_like(cell) if g is None else upcast_half(g).reshape(cell.shape) for g in g_last)
    weights = [upcast_half(ctx.saved(f"weight{i}")) for i in range(4)]
    gradients = g_steps, g_hidden[0], g_cell[0]
    x = _in_order(ctx, ctx.saved("input"))
    return as_one_op(gate_gradients, _empty_gradients, _ARGUMENTS)(x, before, cell[0], *gradients, *weights), before


def gate_gradients(
    x: Tensor,
    before: Tensor,
    cell: Tensor,
    g_steps: Tensor,
    g_hidden: Tensor,
    g_cell: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
) -> Tensor:
    """Compute the gradient at each gate of a layer: (time, column, 4 h).

    Args:
        x: the inputs.
        before: the hidden state before each step.
        cell: the cell before the first step.
        g_steps: the gradients at the outputs.
        g_hidden: the gradient at the last hidden state.
        g_cell: the gradient at the last cell.
        w_ih: the weight of inputs.
        w_hh: the weight of hidden states.
        b_ih: the bias of inputs.
        b_hh: the bias of hidden states.
    """
    gates = _gates(x, before, w_ih, w_hh, b_ih, b_hh)
    i, f, c, o = gates.unbind(2)
    cells = _cells(cell, i * c, f)
    top = cells[1:].tanh()
    # Everything but the running gradients of hidden state and cell is known for all steps at once.
    slopes = gates.new_empty(gates.shape)
    in_slope, forget_slope, cell_slope, out_slope = slopes.unbind(2)
    aten.sigmoid_backward.grad_input(c, i, grad_input=in_slope)
    aten.sigmoid_backward.grad_input(cells[:-1], f, grad_input=forget_slope)
    aten.tanh_backward.grad_input(i, c, grad_input=cell_slope)
    aten.sigmoid_backward.grad_input(top, o, grad_input=out_slope)
    return _swept(slopes, aten.tanh_backward(o, top), f, (g_steps, g_hidden, g_cell), w_hh)


def _empty_gradients(_: Tensor, before: Tensor, *__: Any) -> Tensor:
    """Return an empty tensor of the shape of `gate_gradients`."""
    return before.new_empty(*before.shape[:2], 4 * before.shape[2])


def _gates(x: Tensor, before: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """Return what came out of the gates: (time, column, gate, h)."""
    time, columns, width = before.shape
    flat = x.reshape(time * columns, w_ih.shape[1]) @ w_ih.T
    if b_ih.dim() == 1:  # a layer without biases has zeros in the shape of its weights in their places
        flat += b_ih + b_hh
    gates = flat.addmm_(before.flatten(0, 1), w_hh.T).view(time, columns, 4, width)
    gates[:, :, :2].sigmoid_()
    gates[:, :, 2].tanh_()
    gates[:, :, 3].sigmoid_()
    return gates


def _cells(first: Tensor, added: Tensor, forget: Tensor) -> Tensor:
    """Return the cell before the first step and after each one."""
    cells = added.new_empty(len(added) + 1, *first.shape)
    each = cells.unbind()
    each[0].copy_(first)
    for t, (add, keep) in enumerate(zip(added.unbind(), forget.unbind(), strict=True)):
        torch.addcmul(add, keep, each[t], out=each[t + 1])
    return cells


def _swept(slopes: Tensor, to_cell: Tensor, forget: Tensor, gradients: tuple[Tensor, ...], w_hh: Tensor) -> Tensor:
    """Go back in time and multiply the slopes of the gates by the gradients that arrive, in place."""
    g_steps, *g_last = gradients
    d_hidden, d_cell = (g.clone() for g in g_last)
    by_cell, by_hidden, flat = slopes[:, :, :3], slopes[:, :, 3], slopes.flatten(2)
    steps = list(zip(*(x.unbind() for x in (g_steps, to_cell, by_cell, by_hidden, forget, flat)), strict=True))
    for g, to, of_cell, of_hidden, keep, step in reversed(steps):
        d_hidden += g
        d_cell.addcmul_(d_hidden, to)
        of_cell *= d_cell[:, None]
        of_hidden *= d_hidden
        d_cell *= keep
        torch.mm(step, w_hh, out=d_hidden)
    return flat


_INPUT = {0: "input"}
add_op("MkldnnRnnLayer", entry=OpEntry(by_column, keeps=_INPUT, all_outputs=True, rule=lstm))
# These keep their gates in a block that is theirs alone: their backward is run once for each sample.
add_op("CudnnRnn", "MiopenRnn", "LstmMps", entry=OpEntry(by_column, keeps=_INPUT, all_outputs=True))
_GATES = {0: "input_gates", 1: "hidden_gates"}
add_op("ThnnFusedLstmCell", entry=OpEntry(by_row, keeps={**_GATES, 2: "cx"}, all_outputs=True))
add_op("ThnnFusedGruCell", entry=OpEntry(by_row, keeps={**_GATES, 2: "hx"}, all_outputs=True))
