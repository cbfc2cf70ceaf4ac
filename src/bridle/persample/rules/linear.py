"""Matrix products: linear layers of every rank, attention projections, low-rank updates.

Legend: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of
the matrix. The gradient of sample b is the sum over t of left[b, t, :] times right[b, t, :].
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .._grams import Grams, strip_of
from .._numbers import double, is_moderate, largest_of, lengths_of, square, weighed, wide
from .._owners import Layout, NotSeparableError
from .._pieces import ALL, Dense, Piece, redo_where_lost
from .._use import Use

# Writing or reading one number costs about as much as this many multiply-adds in a large matrix product.
TRAFFIC = 16.0


class Outer(Piece):
    """Gradients that are sums of outer products, held as their two factors."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.samples, self.rows, m = left.shape
        self.shape = (m, right.shape[-1])
        gram, streamed = self._costs()
        self.how = "gram" if gram <= streamed and not left.is_complex() else "streamed"

    @staticmethod
    def joined(pieces: Sequence["Outer"]) -> "Outer":
        """Put several uses of one matrix behind each other: more rows, the same sum."""
        return Outer(torch.cat([piece.left for piece in pieces], 1), torch.cat([piece.right for piece in pieces], 1))

    def transposed(self) -> "Outer":
        """Return the same for the transposed matrix."""
        return Outer(self.right, self.left)

    def dense(self, part: slice = ALL) -> Tensor:  # noqa: D102
        return wide(self.left[part]).transpose(1, 2) @ wide(self.right[part])

    def squared_norms(self, grams: Grams | None = None) -> Tensor:  # noqa: D102
        if self.rows == 1:
            return square(lengths_of(wide(self.left))) * square(lengths_of(wide(self.right)))
        if self.how != "gram":
            return super().squared_norms()
        grams = Grams() if grams is None else grams
        step = strip_of(self.rows)
        squares = bound = left = right = torch.zeros(self.samples, dtype=torch.float64, device=self.left.device)
        for i, (a, b) in enumerate(zip(grams.strips(self.left), grams.strips(self.right), strict=True)):
            strip = a * b
            strip[:, :, : i * step] *= 2  # what is left of the diagonal stands for the other half as well
            squares = squares + strip.sum((1, 2), dtype=torch.float64)
            bound = bound + torch.linalg.vector_norm(strip, 1, dim=(1, 2)).double()
            left, right = (
                torch.maximum(most, x.diagonal(i * step, 1, 2).amax(1).double()) for most, x in ((left, a), (right, b))
            )
        return redo_where_lost(self, squares, self._doubt(squares, bound, left + right))

    def _doubt(self, squares: Tensor, bound: Tensor, largest: Tensor) -> Tensor:
        """Return the error of norms made from Gram matrices.

        Args:
            squares: the squared norms.
            bound: the sums of the absolute values in them, which are rounded.
            largest: the largest squared length of a row. A product that is too small for the dtype takes up to `tiny`
                from a number of one matrix, which is then multiplied by one of the other.
        """
        info = torch.finfo(torch.promote_types(self.left.dtype, torch.float32))
        doubt = info.eps * bound + info.tiny * self.rows**2 * (sum(self.shape) * largest + 1)
        zero = (squares == 0).nonzero().squeeze(1)
        nothing = (largest_of(self.left[zero]) == 0) | (largest_of(self.right[zero]) == 0)
        doubt[zero[nothing]] = 0
        return doubt

    def holds(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.left, self.right

    def factors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.left, self.right) if self.how == "gram" and self.rows > 1 else ()

    def weighted(self, weights: Tensor) -> Tensor:  # noqa: D102
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:
            left = weighed(left, weights)
        else:
            right = weighed(right, weights)
        dtype = torch.promote_types(left.dtype, right.dtype)
        return left.flatten(0, 1).T.to(dtype) @ right.flatten(0, 1).to(dtype)

    def dot(self, direction: Tensor) -> Tensor:  # noqa: D102
        if self.left.is_complex():
            return super().dot(direction)
        left, right = wide(self.left), wide(self.right)
        return ((left @ direction.to(left)) * right).sum((1, 2), dtype=torch.float64)

    def gram(self) -> Tensor:  # noqa: D102
        if self.left.is_complex() or (self.rows > 1 and self.rows**2 * sum(self.shape) > self.shape[0] * self.shape[1]):
            return super().gram()
        left, right = (x if is_moderate(x) else double(x) for x in (wide(self.left), wide(self.right)))
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        products = (left @ left.T) * (right @ right.T)
        if self.rows == 1:
            return products.double()
        cut = products.view(self.samples, self.rows, self.samples, self.rows)
        return cut.sum((1, 3), dtype=torch.float64)

    def saving(self) -> float:
        """Written down, one product serves the norm and the sum, and is then read twice."""
        return self.samples * (min(self._costs()) - 3 * TRAFFIC * prod(self.shape))

    def _costs(self) -> tuple[float, float]:
        m, n, t = *self.shape, self.rows
        if t == 1:
            return 0.0, 1.0
        pairs = t * (t + min(t, strip_of(t))) / 2
        return pairs * (m + n + 2 * TRAFFIC), t * m * n + 2 * TRAFFIC * m * n


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
