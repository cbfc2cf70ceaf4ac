"""Stacks of matrices: experts, heads, batched products. Each row of data meets one member of the stack.

Legend: r row of data, e member of the stack, m and n the two sides of a member. The gradient of a sample at member e is
the sum over its rows r that met e of left[r, :] times right[r, :].
"""

import torch
from torch import Tensor

from ..ownership.layout import NotSeparableError, SampleLayout
from ..representations.base import Dense, SampleGrads
from ..representations.members import Members
from .context import RuleContext
from .registry import rule


@rule("GroupedMmBackward0")
def grouped_mm(ctx: RuleContext) -> SampleGrads:
    """Rows in groups, each with its own matrix; ``offs`` says where groups end."""
    offs, rows, stack = ctx.saved("offs"), ctx.saved("self"), ctx.shape
    if ctx.position != 1 or offs is None or rows.dim() != 2 or len(stack) != 3:
        raise NotSeparableError
    member = torch.searchsorted(offs.long(), torch.arange(len(rows), device=rows.device), right=True)
    return Members(rows, ctx.gradient, owner_of_rows(ctx.layout, ctx.gradient), member, ctx.samples, stack[0])


@rule("BmmBackward0")
def bmm(ctx: RuleContext) -> SampleGrads:
    """``self @ mat2`` for a stack of matrices."""
    return _stack(ctx, ctx.position, ("self", "mat2"), 1)


@rule("BaddbmmBackward0")
def baddbmm(ctx: RuleContext) -> SampleGrads:
    """``beta * self + alpha * batch1 @ batch2`` for a stack of matrices."""
    if ctx.position == 0:
        beta = ctx.saved("beta")
        return Dense(ctx.layout.sums(ctx.gradient if beta == 1 else ctx.gradient * beta.conjugate(), ctx.shape))
    return _stack(ctx, ctx.position - 1, ("batch1", "batch2"), ctx.saved("alpha"))


def _stack(ctx: RuleContext, side: int, names: tuple[str, str], factor: complex) -> SampleGrads:
    """The second factor meets whole rows of the output, the first one whole columns."""
    g = ctx.gradient if factor == 1 else ctx.gradient * factor.conjugate()
    other = ctx.saved(names[1 - side]).conj()
    if side == 0:
        owner = _owner_of_columns(ctx.layout, g)
        left, right = g.transpose(1, 2), other.transpose(1, 2)
    else:
        owner = owner_of_rows(ctx.layout, g)
        left, right = other, g
    member = torch.arange(len(g), device=g.device).repeat_interleave(left.shape[1])
    return Members(left.flatten(0, 1), right.flatten(0, 1), owner, member, ctx.samples, len(g))


def owner_of_rows(layout: SampleLayout, g: Tensor) -> Tensor:
    """Return the owner of each row of the last dimension, -1 where the gradient is zero."""
    return _common(layout.owner_of_each(g.numel(), g.device).view(-1, g.shape[-1]))


def _owner_of_columns(layout: SampleLayout, g: Tensor) -> Tensor:
    owners = layout.owner_of_each(g.numel(), g.device).view(g.shape)
    return _common(owners.transpose(1, 2).flatten(0, 1))


def _common(owners: Tensor) -> Tensor:
    if not owners.shape[1]:
        return owners.new_full((len(owners),), -1)
    most = owners.amax(1)
    if not bool(((owners == most[:, None]) | (owners < 0)).all()):
        raise NotSeparableError
    return most
