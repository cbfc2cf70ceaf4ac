"""The fused LSTM layer of the CPU: gates computed again in one product, their gradients by one sweep.

Legend: t time, n column of the batch, h hidden, i input width. The gates come in the order in, forget, cell,
out, each of width h, as in the weights.
"""

import torch
from torch import Tensor

from .._owners import Layout, NotSeparableError
from .._pieces import Dense, Piece, wide
from .._use import Use
from .linear import Outer

_WEIGHT_IH, _WEIGHT_HH = 1, 2


def lstm(use: Use) -> Piece:
    """Input weight, hidden weight and the two biases, at positions 1 to 4."""
    if use.position not in (1, 2, 3, 4) or use.saved("batch_sizes"):
        raise NotSeparableError
    key = "gate gradients"
    if key not in use._cache:  # the weights and biases of a layer are four uses of one node
        columns = _owner_of_columns(use)
        deltas, before = (_by_sample(columns, x) for x in _gate_gradients(use))
        use._cache[key] = columns, deltas, before, deltas.sum(1)
    columns, deltas, before, bias = use._cache[key]
    if use.position == _WEIGHT_IH:
        return Outer(deltas, _by_sample(columns, _in_time(use, use.saved("input"))))
    if use.position == _WEIGHT_HH:
        return Outer(deltas, before)
    return Dense(bias)


def _owner_of_columns(use: Use) -> Layout:
    """Find who owns each column: it is the same at all times, also where the gradient is zero."""
    owner: Tensor | None = None
    for g, layout in zip(use.gradients[:3], use.layouts[:3], strict=True):
        if g is None:
            continue
        each = layout.owner_of_each(g.numel(), g.device).view(-1, *g.shape[-2:])
        has_gradient = g.view(each.shape) != 0
        most = torch.where(has_gradient, each, -1).amax((0, 2))
        if not bool(((each == most[:, None]) | ~has_gradient).all()):
            raise NotSeparableError
        owner = most if owner is None else torch.maximum(owner, most)
    assert owner is not None
    if torch.equal(owner, torch.arange(use.samples, device=owner.device)):
        return Layout(use.samples, 1, None, certain=False)  # the usual order needs no sorting
    return Layout(use.samples, None, owner, certain=False)


def _by_sample(columns: Layout, x: Tensor) -> Tensor:
    """Return (time, column, width) as (samples, rows, width)."""
    time, _, width = x.shape
    rows = columns.by_sample(x.transpose(0, 1).flatten(1), 1)
    return rows.reshape(columns.samples, -1, width) if time else rows


def _in_time(use: Use, x: Tensor) -> Tensor:
    """Return the steps in the order in which the layer took them."""
    return wide(x.flip(0) if use.saved("reverse") else x)


def _gate_gradients(use: Use) -> tuple[Tensor, Tensor]:
    """Return the gradient at every gate before its nonlinearity, and the hidden state before every step."""
    w_ih, w_hh, b_ih, b_hh = (wide(use.saved(f"weight{i}")) for i in range(4))
    x, out = _in_time(use, use.saved("input")), _in_time(use, use.saved("result0"))
    before = torch.cat([wide(use.saved("hx_")).reshape(1, *out.shape[1:]), out[:-1]])
    gates = torch.addmm(b_ih + b_hh, x.flatten(0, 1), w_ih.T)
    gates = gates.addmm_(before.flatten(0, 1), w_hh.T).view(*out.shape[:2], -1)
    i, f, c, o = gates.chunk(4, -1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cells = [wide(use.saved("cx_")).reshape(out.shape[1:])]
    for t in range(len(out)):
        cells.append(torch.addcmul(f[t] * cells[-1], i[t], c[t]))
    cell_before, cell = torch.stack(cells[:-1]), torch.stack(cells[1:]).tanh()
    # Everything but the running gradients of hidden state and cell is known for all steps at once.
    to_cell = o * (1 - cell.square())
    slope = torch.stack([i * (1 - i) * c, f * (1 - f) * cell_before, (1 - c.square()) * i])
    slope_o = o * (1 - o) * cell
    g_out, g_hidden, g_cell = use.gradients[:3]
    g_steps = torch.zeros_like(out) if g_out is None else _in_time(use, g_out)
    d_hidden = torch.zeros_like(out[0]) if g_hidden is None else wide(g_hidden).reshape(out.shape[1:])
    d_cell = torch.zeros_like(out[0]) if g_cell is None else wide(g_cell).reshape(out.shape[1:])
    deltas = torch.empty_like(gates)
    for t in reversed(range(len(out))):
        d_hidden = d_hidden + g_steps[t]
        d_cell = torch.addcmul(d_cell, d_hidden, to_cell[t])
        step = deltas[t].view(-1, 4, out.shape[-1])
        torch.mul(d_cell[:, None], slope[:, t].transpose(0, 1), out=step[:, :3])
        torch.mul(d_hidden, slope_o[t], out=step[:, 3])
        d_cell = d_cell * f[t]
        d_hidden = deltas[t] @ w_hh
    return deltas, before
