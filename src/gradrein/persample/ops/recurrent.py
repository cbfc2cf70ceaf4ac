"""Recurrent layers that are one op: the fused LSTM of the CPU, and all layers of cuDNN at once.

Legend: n column of the batch, t time, h hidden, i input width. Time comes first here, whatever the layer was told.
The gates come in the order in, forget, cell, out, each of width h, as in the weights.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import UNREACHED, NotSeparableError, Owners
from ..representations.base import Dense, Outer, SampleGrads
from ..representations.numerics import upcast_half
from ..tracing import as_one_op, structure
from .rules import RuleContext
from .table import OpEntry, Step, add_op, base_name

# At which positions, counted from the first input or from the last, each layer has its states.
_STATES = {"MkldnnRnnLayer": (5, 6), "CudnnRnn": (-2, -1), "MiopenRnn": (-2, -1), "LstmMps": (1, 2)}
_GATES = (1, 1, 4, 3)  # of each mode of cuDNN: rectified, tanh, LSTM, GRU
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
            if column_of is not None and not number:
                line = out.line(0).collected(0, column_of, (columns,))
            else:
                line = out.line(-2 if number else batch)
            owners = owners.merged(line)
    if column_of is not None and not is_state:
        return Owners(owners.picked(0, column_of).ids[:, None], step.shape)
    sizes = [1] * len(step.shape)
    sizes[-2 if is_state else batch] = -1
    return Owners(owners.ids.reshape(sizes), step.shape)


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
    """The layer of the CPU: input weight, hidden weight and the two biases, at positions 1 to 4."""
    if ctx.position not in (1, 2, 3, 4) or ctx.saved("batch_sizes"):
        raise NotSeparableError
    if "cells" not in ctx._cache:  # the weights and biases of a layer are four uses of one node
        deltas, before = _gate_gradients(ctx)
        ctx._cache["cells"] = [_cell(ctx, -2, deltas, deltas, _in_order(ctx, ctx.saved("input")), before)]
    return _use(ctx._cache["cells"][0], ctx.position - 1)


def cudnn(ctx: RuleContext) -> SampleGrads:
    """The layers of cuDNN, all in one op: the same four of every layer and direction, one after the other."""
    number, each = ctx.position - 1, ctx.saved("weight_stride0")
    weights, dropped = ctx.saved("weight"), ctx.saved("dropout") and ctx.saved("num_layers") > 1
    projected = len(weights[0]) != _GATES[ctx.saved("mode")] * weights[1].shape[1]
    if not 0 <= number < len(weights) or ctx.saved("batch_sizes") or projected or dropped:
        raise NotSeparableError
    if "cells" not in ctx._cache:
        batch = 0 if ctx.saved("batch_first") else -2
        ctx._cache["cells"] = [_cell(ctx, batch, *cell) for cell in _cudnn_cells(ctx)]
    return _use(ctx._cache["cells"][number // each], number % each)


def _cell(
    ctx: RuleContext, batch: int, to_input: Tensor, to_hidden: Tensor, x: Tensor, before: Tensor
) -> tuple[Tensor, ...]:
    """Return gradients at the gates, as inputs and as hidden states came there, and both of these: all by sample."""
    if "columns" not in ctx._cache:
        with structure():
            ctx._cache["columns"] = _owner_of_columns(ctx, batch)
    columns = ctx._cache["columns"]
    deltas = _by_sample(columns, to_input)
    others = deltas if to_hidden is to_input else _by_sample(columns, to_hidden)
    return deltas, others, _by_sample(columns, x), _by_sample(columns, before)


def _use(cell: tuple[Tensor, ...], which: int) -> SampleGrads:
    """Return the gradients of the weight of inputs, of that of hidden states, or of the bias of either."""
    to_input, to_hidden, x, before = cell
    if which < 2:
        return Outer(to_hidden, before) if which else Outer(to_input, x)
    return Dense((to_hidden if which == 3 else to_input).sum(1))


def _cudnn_cells(ctx: RuleContext) -> Iterator[tuple[Tensor, ...]]:
    """Yield of each layer and direction the gradients at its gates, its inputs and the hidden state before each step.

    cuDNN keeps its gates to itself. The layers are run a second time with one more input for each gate: zeros, which
    are added there as they are. What arrives at the gates is then the gradient of these inputs.
    """
    mode, both, each = ctx.saved("mode"), ctx.saved("bidirectional"), ctx.saved("weight_stride0")
    run: Any = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)[mode]
    gates, first_dims = _GATES[mode], (0, 1) if ctx.saved("batch_first") else (0, 0)
    weights = [upcast_half(w) for w in ctx.saved("weight")]
    states = [upcast_half(ctx.saved(name)) for name in ("hx", "cx") if ctx.saved(name) is not None]
    out, size, directions = upcast_half(ctx.saved("input").transpose(*first_dims)), states[0].shape[-1], 1 + both
    inputs, at_gates, ends = [out], [], []
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these weights do not lie in one piece
        for first in range(0, len(weights), each * directions):
            own, now = weights[first : first + each * directions], first // each
            at_gates.append(out.new_zeros(*out.shape[:2], directions * gates * size, requires_grad=True))
            picks = torch.eye(directions * gates * size, dtype=out.dtype, device=out.device).chunk(directions)
            own[::each] = [torch.cat(pair, 1) for pair in zip(own[::each], picks, strict=True)]
            state = [s[now : now + directions].contiguous() for s in states]
            start = state if gates == 4 else state[0]
            out, *last = run(torch.cat([out, at_gates[-1]], 2), start, own, each == 4, 1, 0.0, True, bool(both), False)
            inputs.append(out.detach())
            ends.append(last)
        outputs = [out, *(torch.cat(parts) for parts in zip(*ends, strict=True))]
    given = [None if g is None else upcast_half(g) for g in ctx.gradients[: len(outputs)]]
    given[0] = None if given[0] is None else given[0].transpose(*first_dims)
    reached = [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None]
    starts, arrived = zip(*reached, strict=True)
    for layer, deltas in enumerate(torch.autograd.grad(starts, at_gates, arrived, materialize_grads=True)):
        for direction, to_input in enumerate(deltas.chunk(directions, 2)):
            number = layer * directions + direction
            after, first_state = inputs[layer + 1].chunk(directions, 2)[direction], states[0][number][None]
            before = torch.cat([after[1:], first_state] if direction else [first_state, after[:-1]])
            to_hidden = to_input
            if gates == 3:  # reset, update, new: the last one gets its hidden part through the first
                parts = [weights[number * each + i] for i in range(each)]
                reset = _first_gate(inputs[layer], before, parts, size).sigmoid()
                to_hidden = torch.cat([to_input[..., : 2 * size], to_input[..., 2 * size :] * reset], 2)
            yield to_input, to_hidden, inputs[layer], before


def _first_gate(x: Tensor, before: Tensor, weights: Sequence[Tensor], size: int) -> Tensor:
    """Return what goes into the first gate of a cell."""
    w_ih, w_hh, *biases = (w[:size] for w in weights)
    return x @ w_ih.T + before @ w_hh.T + sum(biases)


def _owner_of_columns(ctx: RuleContext, batch: int) -> Owners:
    """Find who owns each column: it is the same at all times, also where the gradient is zero."""
    host = torch.device("cpu")
    outs = zip((batch, -2, -2), ctx.gradients[:3], ctx.layouts[:3], strict=True)
    each = [layout.along([dim], host) for dim, gradient, layout in outs if gradient is not None]
    return Owners.of_rows(torch.stack(each).amax(0), ctx.samples)


def _by_sample(columns: Owners, x: Tensor) -> Tensor:
    """Return (time, column, width) as (samples, rows, width)."""
    time, count, width = x.shape
    rows = x.transpose(0, 1)
    if columns.block == 1 and count == columns.samples:
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
    """Compute the gradient at each gate of a layer, (time, column, 4 h), from those at outputs and last states."""
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
# MIOpen has the same layers as cuDNN, and torch the same functions for both. Those of MPS run once for each sample.
add_op("CudnnRnn", "MiopenRnn", entry=OpEntry(by_column, keeps=_INPUT, all_outputs=True, rule=cudnn, runs_op=True))
add_op("LstmMps", entry=OpEntry(by_column, keeps=_INPUT, all_outputs=True))
_PARTS = {0: "input_gates", 1: "hidden_gates"}
add_op("ThnnFusedLstmCell", entry=OpEntry(by_row, keeps={**_PARTS, 2: "cx"}, all_outputs=True))
add_op("ThnnFusedGruCell", entry=OpEntry(by_row, keeps={**_PARTS, 2: "hx"}, all_outputs=True))
