"""Matrix products: linear layers of every rank, attention projections, low-rank updates.

Legend: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of
the matrix. The gradient of sample b is the sum over t of left[b, t, :] times right[b, t, :].
"""

from torch import Tensor

from ..layout.owners import Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import Dense, SampleGrads
from ..representations.outer import Outer
from .context import RuleContext
from .table import OpEntry, Step, add_op, base_name


def matmul(step: Step) -> Owners:
    """Rows of the product come from rows of the left factor, columns from columns of the right one."""
    factor = step.position - (base_name(step.node) in ("Addmm", "Baddbmm"))
    if factor < 0:
        return step.out.summed_to(step.shape)
    return Owners(step.out.mixed([-1 if factor == 0 else -2]).ids, step.shape)


def matrix_vector(step: Step) -> Owners:
    """Each entry of the product comes from one row, and from all of the vector."""
    return step.out.without([1], step.shape) if step.position == 0 else step.mixed()


def distances(step: Step) -> Owners:
    """Rows of the distances come from rows of the first factor, columns from rows of the second one."""
    if step.position == 0:
        return Owners(step.out.mixed([-1]).ids, step.shape)
    return Owners(step.out.mixed([-2]).ids.transpose(-1, -2), step.shape)


def _outer(layout: SampleLayout, left: Tensor, right: Tensor, width: int) -> Outer:
    return Outer(layout.by_sample(left, width), layout.by_sample(right, width))


def addmm(ctx: RuleContext) -> SampleGrads:
    """``beta * self + alpha * mat1 @ mat2``; a linear layer has its weight at mat2."""
    if ctx.position == 0:
        return _added(ctx)
    return _product(ctx, ctx.position - 1, "mat1", "mat2", ctx.saved("alpha"))


def mm(ctx: RuleContext) -> SampleGrads:
    """``self @ mat2``."""
    return _product(ctx, ctx.position, "self", "mat2", 1)


def _added(ctx: RuleContext) -> SampleGrads:
    beta = ctx.saved("beta")
    return Dense(ctx.layout.sums(ctx.gradient if beta == 1 else ctx.gradient * beta.conjugate(), ctx.shape))


def _product(ctx: RuleContext, side: int, first: str, second: str, factor: float) -> SampleGrads:
    g = ctx.gradient if factor == 1 else ctx.gradient * factor.conjugate()
    if side == 1:
        return _outer(ctx.layout, ctx.saved(first).conj(), g, g.shape[-1])
    other = ctx.saved(second).conj()
    return _outer(_transposed(ctx.layout, g), g.T, other.T, g.shape[0])


def _transposed(layout: SampleLayout, g: Tensor) -> SampleLayout:
    """Return the owners of ``g.T``, when whole columns of g have one owner."""
    rows, columns = g.shape
    if layout.block is None:
        assert layout.owners is not None
        return SampleLayout(layout.samples, None, layout.owners.view(rows, columns).T.reshape(-1))
    if columns % (layout.block * layout.samples):
        raise NotSeparableError
    return SampleLayout(layout.samples, layout.block * rows, None)


add_op("Mm", entry=OpEntry(matmul, keeps={0: "self", 1: "mat2"}, rule=mm))
add_op("Addmm", entry=OpEntry(matmul, keeps={1: "mat1", 2: "mat2"}, rule=addmm))
add_op("Mv", entry=OpEntry(matrix_vector, keeps={0: "self", 1: "vec"}))
add_op("Cdist", "EuclideanDist", entry=OpEntry(distances, keeps={0: "x1", 1: "x2"}))
