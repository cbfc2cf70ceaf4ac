"""Matrix products: linear layers, attention projections, low-rank updates; experts, heads, batched products.

Legend: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of the matrix,
e member of a stack of matrices, r row of data, which meets one member. The gradient of a sample is the sum over its
rows of left[row, :] times right[row, :], at the member that each row met.
"""

import torch
from torch import Tensor

from ..layout import NotSeparableError, Owners
from ..representations.base import Dense, Outer, SampleGrads
from ..representations.members import Members
from .rules import RuleContext
from .table import OpEntry, Step, add_op, base_name


def matmul(step: Step) -> Owners:
    """Rows of the product come from rows of the left factor, columns from columns of the right one."""
    factor = step.position - (base_name(step.node) in ("Addmm", "Baddbmm"))
    if factor < 0:
        return step.out.summed_to(step.shape)
    return Owners(step.out.mixed([-1 if factor == 0 else -2]).ids, step.shape)


def matrix_vector(step: Step) -> Owners:
    """Each entry of the product comes from one row, and from all of the vector."""
    factor = step.position - (base_name(step.node) == "Addmv")
    if factor < 0:
        return step.out.summed_to(step.shape)
    return step.out.without([1], step.shape) if factor == 0 else step.mixed()


def distances(step: Step) -> Owners:
    """Rows of the distances come from rows of the first factor, columns from rows of the second one."""
    if step.position == 0:
        return Owners(step.out.mixed([-1]).ids, step.shape)
    return Owners(step.out.mixed([-2]).ids.transpose(-1, -2), step.shape)


def addmm(ctx: RuleContext) -> SampleGrads:
    """``beta * self + alpha * mat1 @ mat2``; a linear layer has its weight at mat2."""
    return _product(ctx, ctx.position - 1, ("mat1", "mat2"), "alpha") if ctx.position else _added(ctx)


def mm(ctx: RuleContext) -> SampleGrads:
    """``self @ mat2``."""
    return _product(ctx, ctx.position, ("self", "mat2"))


def _added(ctx: RuleContext) -> SampleGrads:
    beta = ctx.saved("beta")
    return Dense(ctx.layout.sums(ctx.gradient if beta == 1 else ctx.gradient * beta.conjugate(), ctx.shape))


def _operands(ctx: RuleContext, side: int, names: tuple[str, str], factor: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of a product, times a factor if there is one, and the other side, given torch's names."""
    alpha, other = ctx.saved(factor) if factor else 1, ctx.saved(names[1 - side]).conj()
    return ctx.gradient if alpha == 1 else ctx.gradient * alpha.conjugate(), other


def _product(ctx: RuleContext, side: int, names: tuple[str, str], factor: str = "") -> SampleGrads:
    """Take the gradient of one side of a product."""
    g, other = _operands(ctx, side, names, factor)
    layout, width = (ctx.layout, g.shape[-1]) if side else (ctx.layout.transposed, g.shape[0])
    left, right = (other, g) if side else (g.T, other.T)
    return Outer(layout.by_sample(left, width), layout.by_sample(right, width))


add_op("Mm", entry=OpEntry(matmul, keeps={0: "self", 1: "mat2"}, rule=mm))
add_op("Addmm", entry=OpEntry(matmul, keeps={1: "mat1", 2: "mat2"}, rule=addmm))
add_op("Mv", entry=OpEntry(matrix_vector, keeps={0: "self", 1: "vec"}))
add_op("Addmv", entry=OpEntry(matrix_vector, keeps={1: "mat", 2: "vec"}))
add_op("Dot", entry=OpEntry(Step.mixed, keeps={0: "self", 1: "tensor"}))
add_op("Vdot", "Dist", entry=OpEntry(Step.mixed, keeps={0: "self", 1: "other"}))
add_op("Cdist", "EuclideanDist", entry=OpEntry(distances, keeps={0: "x1", 1: "x2"}))


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
    return Members(rows, ctx.gradient, ctx.layout.along([0], rows.device), member, ctx.samples, stack[0])


def bmm(ctx: RuleContext) -> SampleGrads:
    """``self @ mat2`` for a stack of matrices."""
    return _stack(ctx, ctx.position, ("self", "mat2"))


def baddbmm(ctx: RuleContext) -> SampleGrads:
    """``beta * self + alpha * batch1 @ batch2`` for a stack of matrices."""
    return _stack(ctx, ctx.position - 1, ("batch1", "batch2"), "alpha") if ctx.position else _added(ctx)


def _stack(ctx: RuleContext, side: int, names: tuple[str, str], factor: str = "") -> SampleGrads:
    """The second factor meets whole rows of the output, the first one whole columns."""
    g, other = _operands(ctx, side, names, factor)
    owner = ctx.layout.along([0, 2 - side], g.device)
    left, right = (other, g) if side else (g.transpose(1, 2), other.transpose(1, 2))
    member = torch.arange(len(g), device=g.device).repeat_interleave(left.shape[1])
    return Members(left.flatten(0, 1), right.flatten(0, 1), owner, member, ctx.samples, len(g))


add_op("Bmm", entry=OpEntry(matmul, keeps={0: "self", 1: "mat2"}, rule=bmm))
add_op("Baddbmm", entry=OpEntry(matmul, keeps={1: "batch1", 2: "batch2"}, rule=baddbmm))
add_op("GroupedMm", entry=OpEntry(rows_with_weights, keeps={0: "self"}, rule=grouped_mm))
add_op("Trilinear", entry=OpEntry(rows_with_weights, keeps={0: "i1", 2: "i3"}))
