"""Stacks of matrices: experts, heads, batched products. Each row of data meets one member of the stack.

Legend: r row of data, e member of the stack, m and n the two sides of a member. The gradient of a sample at member e is
the sum over its rows r that met e of left[r, :] times right[r, :].
"""

import torch
from torch import Tensor

from ..layout.owners import Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import Computed, Dense, SampleGrads
from ..representations.members import Members
from ..representations.numerics import scale_rows, upcast_half
from .context import RuleContext
from .products import matmul
from .table import OpEntry, Step, add_op

# How torch lines up (t, i), (o, i, j) and (t, j): dimensions to insert into each, and those to sum over.
_BILINEAR = {"expand1": (1, 3), "expand2": (0,), "expand3": (1, 2), "sumdim": (2, 3)}


def rows_with_weights(step: Step) -> Owners:
    """Each row meets some weights; these get a gradient from all rows."""
    alike = step.shape[:-1] == step.out.shape[:-1]
    return Owners(step.out.mixed([-1]).ids, step.shape) if alike and step.position != 1 else step.mixed()


def grouped_mm(ctx: RuleContext) -> SampleGrads:
    """Rows in groups, each with its own matrix; ``offs`` says where groups end."""
    offs, rows, stack = ctx.saved("offs"), ctx.saved("self"), ctx.shape
    if ctx.position != 1 or offs is None or rows.dim() != 2 or len(stack) != 3:
        raise NotSeparableError
    member = torch.searchsorted(offs.long(), torch.arange(len(rows), device=rows.device), right=True)
    return Members(rows, ctx.gradient, owner_of_rows(ctx.layout, ctx.gradient), member, ctx.samples, stack[0])


def trilinear(ctx: RuleContext) -> SampleGrads:
    """A product of three tensors, where it is that of a weight and two inputs."""
    if ctx.position != 1 or any(tuple(ctx.saved(name)) != dims for name, dims in _BILINEAR.items()):
        raise NotSeparableError
    width = ctx.shape[0]
    g, x, y = (upcast_half(ctx.layout.by_sample(t, width)) for t in (ctx.gradient, ctx.saved("i1"), ctx.saved("i3")))

    def dense(part: slice) -> Tensor:
        return torch.einsum("bto,bti,btj->boij", g[part], x[part], y[part])

    def weighted(weights: Tensor) -> Tensor:
        heavy = scale_rows(g, weights)
        return torch.einsum("bto,bti,btj->oij", heavy, x.to(heavy), y.to(heavy))

    return Computed(ctx.samples, ctx.shape, dense, weighted, held_tensors=(g, x, y))


def bmm(ctx: RuleContext) -> SampleGrads:
    """``self @ mat2`` for a stack of matrices."""
    return _stack(ctx, ctx.position, ("self", "mat2"), 1)


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
    return common_owner(layout.owner_of_each(g.numel(), g.device).view(-1, g.shape[-1]))


def _owner_of_columns(layout: SampleLayout, g: Tensor) -> Tensor:
    owners = layout.owner_of_each(g.numel(), g.device).view(g.shape)
    return common_owner(owners.transpose(1, 2).flatten(0, 1))


def common_owner(owners: Tensor) -> Tensor:
    """Return the one owner of each row, -1 where there is none; a row of several cannot be cut."""
    if not owners.shape[1]:
        return owners.new_full((len(owners),), -1)
    most = owners.amax(1)
    if not bool(((owners == most[:, None]) | (owners < 0)).all()):
        raise NotSeparableError
    return most


add_op("Bmm", entry=OpEntry(matmul, keeps={0: "self", 1: "mat2"}, rule=bmm))
add_op("Baddbmm", entry=OpEntry(matmul, keeps={1: "batch1", 2: "batch2"}, rule=baddbmm))
add_op("GroupedMm", entry=OpEntry(rows_with_weights, keeps={0: "self"}, rule=grouped_mm))
add_op("Trilinear", entry=OpEntry(rows_with_weights, keeps={0: "i1", 2: "i3"}, rule=trilinear))
