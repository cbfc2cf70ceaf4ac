"""Matrix products: linear layers of every rank, attention projections, low-rank updates.

Legend: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of
the matrix. The gradient of sample b is the sum over t of left[b, t, :] times right[b, t, :].
"""

from torch import Tensor

from ..ownership.layout import NotSeparableError, SampleLayout
from ..representations.base import Dense, SampleGrads
from ..representations.outer import Outer
from .context import RuleContext
from .registry import rule


def _outer(layout: SampleLayout, left: Tensor, right: Tensor, width: int) -> Outer:
    return Outer(layout.by_sample(left, width), layout.by_sample(right, width))


@rule("AddmmBackward0")
def addmm(ctx: RuleContext) -> SampleGrads:
    """``beta * self + alpha * mat1 @ mat2``; a linear layer has its weight at mat2."""
    if ctx.position == 0:
        return _added(ctx)
    return _product(ctx, ctx.position - 1, "mat1", "mat2", ctx.saved("alpha"))


@rule("MmBackward0")
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
