"""Matrix products: linear layers of every rank, attention projections, low-rank updates.

Legend: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of
the matrix. The gradient of sample b is the sum over t of left[b, t, :] times right[b, t, :].
"""

from torch import Tensor

from ..ownership.layout import Layout, NotSeparableError
from ..representations.base import Dense, Piece
from ..representations.outer import Outer
from .context import Use


def _outer(layout: Layout, left: Tensor, right: Tensor, width: int) -> Outer:
    return Outer(layout.by_sample(left, width), layout.by_sample(right, width))


def addmm(use: Use) -> Piece:
    """``beta * self + alpha * mat1 @ mat2``; a linear layer has its weight at mat2."""
    if use.position == 0:
        return _added(use)
    return _product(use, use.position - 1, "mat1", "mat2", use.saved("alpha"))


def mm(use: Use) -> Piece:
    """``self @ mat2``."""
    return _product(use, use.position, "self", "mat2", 1)


def _added(use: Use) -> Piece:
    beta = use.saved("beta")
    return Dense(use.layout.sums(use.gradient if beta == 1 else use.gradient * beta.conjugate(), use.shape))


def _product(use: Use, side: int, first: str, second: str, factor: float) -> Piece:
    g = use.gradient if factor == 1 else use.gradient * factor.conjugate()
    if side == 1:
        return _outer(use.layout, use.saved(first).conj(), g, g.shape[-1])
    other = use.saved(second).conj()
    return _outer(_transposed(use.layout, g), g.T, other.T, g.shape[0])


def _transposed(layout: Layout, g: Tensor) -> Layout:
    """Return the owners of ``g.T``, when whole columns of g have one owner."""
    rows, columns = g.shape
    if layout.block is None:
        assert layout.owners is not None
        return Layout(layout.samples, None, layout.owners.view(rows, columns).T.reshape(-1))
    if columns % (layout.block * layout.samples):
        raise NotSeparableError
    return Layout(layout.samples, layout.block * rows, None)
