"""Stacks of matrices: experts, heads, batched products. Each row of data meets one member of the stack.

Legend: r row of data, e member of the stack, m and n the two sides of a member. The gradient of a sample at member e is
the sum over its rows r that met e of left[r, :] times right[r, :].
"""

import torch
from torch import Tensor

from ..ownership.layout import Layout, NotSeparableError
from ..representations.base import Dense, Piece
from ..representations.members import Members
from .context import Use


def grouped_mm(use: Use) -> Piece:
    """Rows in groups, each with its own matrix; ``offs`` says where groups end."""
    offs, rows, stack = use.saved("offs"), use.saved("self"), use.shape
    if use.position != 1 or offs is None or rows.dim() != 2 or len(stack) != 3:
        raise NotSeparableError
    member = torch.searchsorted(offs.long(), torch.arange(len(rows), device=rows.device), right=True)
    return Members(rows, use.gradient, owner_of_rows(use.layout, use.gradient), member, use.samples, stack[0])


def bmm(use: Use) -> Piece:
    """``self @ mat2`` for a stack of matrices."""
    return _stack(use, use.position, ("self", "mat2"), 1)


def baddbmm(use: Use) -> Piece:
    """``beta * self + alpha * batch1 @ batch2`` for a stack of matrices."""
    if use.position == 0:
        beta = use.saved("beta")
        return Dense(use.layout.sums(use.gradient if beta == 1 else use.gradient * beta.conjugate(), use.shape))
    return _stack(use, use.position - 1, ("batch1", "batch2"), use.saved("alpha"))


def _stack(use: Use, side: int, names: tuple[str, str], factor: complex) -> Piece:
    """The second factor meets whole rows of the output, the first one whole columns."""
    g = use.gradient if factor == 1 else use.gradient * factor.conjugate()
    other = use.saved(names[1 - side]).conj()
    if side == 0:
        owner = _owner_of_columns(use.layout, g)
        left, right = g.transpose(1, 2), other.transpose(1, 2)
    else:
        owner = owner_of_rows(use.layout, g)
        left, right = other, g
    member = torch.arange(len(g), device=g.device).repeat_interleave(left.shape[1])
    return Members(left.flatten(0, 1), right.flatten(0, 1), owner, member, use.samples, len(g))


def owner_of_rows(layout: Layout, g: Tensor) -> Tensor:
    """Return the owner of each row of the last dimension, -1 where the gradient is zero."""
    return _common(layout.owner_of_each(g.numel(), g.device).view(-1, g.shape[-1]))


def _owner_of_columns(layout: Layout, g: Tensor) -> Tensor:
    owners = layout.owner_of_each(g.numel(), g.device).view(g.shape)
    return _common(owners.transpose(1, 2).flatten(0, 1))


def _common(owners: Tensor) -> Tensor:
    if not owners.shape[1]:
        return owners.new_full((len(owners),), -1)
    most = owners.amax(1)
    if not bool(((owners == most[:, None]) | (owners < 0)).all()):
        raise NotSeparableError
    return most
