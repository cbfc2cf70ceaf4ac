"""Sums of outer products, held as their two factors: of one matrix, or of the members of a stack.

Legend: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of the matrix.
The gradient of sample b is the sum over t of left[b, t, :] times right[b, t, :]. In a stack, r is a row of data and e
the member that it met.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Owners
from ..tracing import is_traced
from .base import ALL, SampleGrads, in_chunks, norms_of_squares
from .numerics import HALF_TYPES, double, is_moderate, row_max, row_norms, scale_rows, upcast_half

if TYPE_CHECKING:
    from typing_extensions import Self

# Writing or reading one number costs about as much as this many multiply-adds in a large matrix product.
TRAFFIC = 16.0


class Outer(SampleGrads):
    """Gradients that are sums of outer products, held as their two factors."""

    def __init__(self, left: Tensor, right: Tensor, strategy: str = "") -> None:
        self.left, self.right = left, right
        self.samples, self.rows, m = left.shape
        self.shape = (m, right.shape[-1])
        gram, streamed = self._costs()
        self.strategy = strategy or ("gram" if gram <= streamed and not left.is_complex() else "streamed")
        self.held_tensors = (left, right)
        # Written down, one product serves the norm and the sum, and is then read twice.
        self.flops_saved = self.samples * (min(gram, streamed) - 3 * TRAFFIC * m * right.shape[-1])

    def joined(self, others: Sequence["Self"]) -> "Outer":
        """Concatenate the rows of several uses of one matrix: the same sum."""
        uses = (self, *others)
        return Outer(torch.cat([use.left for use in uses], 1), torch.cat([use.right for use in uses], 1))

    def swapped(self, dims: tuple[int, int]) -> "Outer | None":
        return Outer(self.right, self.left) if dims == (-2, -1) else None

    def dense(self, part: slice = ALL) -> Tensor:
        left, right = (x[part].float() if x.dtype in HALF_TYPES else x[part] for x in (self.left, self.right))
        return torch.bmm(left.transpose(1, 2), right)

    def norms(self) -> Tensor:
        if self.rows == 1:
            return row_norms(upcast_half(self.left)) * row_norms(upcast_half(self.right))
        if self.strategy != "gram":
            return super().norms()
        squares, bound, largest = gram_sums(self.left, self.right)
        error_bound = gram_error_bound(squares, bound, largest, (self.rows, *self.shape), (self.left, self.right))
        return norms_of_squares(self, squares, error_bound)

    def weighted(self, weights: Tensor) -> Tensor:
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:
            left = scale_rows(left, weights)
        else:
            right = scale_rows(right, weights)
        if left.dtype != right.dtype:
            dtype = torch.promote_types(left.dtype, right.dtype)
            left, right = left.to(dtype), right.to(dtype)
        if self.left.stride(0) < self.left.stride(1):  # rows lie by time, then by sample: copied otherwise
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return torch.mm(left.flatten(0, 1).T, right.flatten(0, 1))

    def dot(self, direction: Tensor) -> Tensor:
        if self.left.is_complex():
            return super().dot(direction)
        left, right = upcast_half(self.left), upcast_half(self.right)
        return ((left @ direction.to(left)) * right).sum((1, 2), dtype=torch.float64)

    def gram(self) -> Tensor:
        if self.left.is_complex() or (self.rows > 1 and self.rows**2 * sum(self.shape) > self.shape[0] * self.shape[1]):
            return super().gram()
        left, right = (x if is_moderate(x) else double(x) for x in (upcast_half(self.left), upcast_half(self.right)))
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        products = (left @ left.T) * (right @ right.T)
        if self.rows == 1:
            return products.double()
        cut = products.view(self.samples, self.rows, self.samples, self.rows)
        return cut.sum((1, 3), dtype=torch.float64)

    def _costs(self) -> tuple[float, float]:
        m, n, t = *self.shape, self.rows
        if t == 1:
            return 0.0, 1.0
        streamed = t * m * n + 2 * TRAFFIC * m * n
        if not self.left.is_cpu:  # whether a Gram matrix has cancelled is a value of the device
            return inf, streamed
        pairs = t * (t + min(t, _rows_in_strip(t))) / 2
        return pairs * (m + n + 2 * TRAFFIC), streamed


def _rows_in_strip(rows: int) -> int:
    """Return how many rows to take at a time: few, to skip most of the upper half, yet enough for a fast product."""
    return min(max(32, rows // 8), 128)


def _gram_strips(x: Tensor) -> Iterator[Tensor]:
    """Yield ``x @ x.T`` of each sample in strips of rows, each without what lies right of the diagonal."""
    x, step = upcast_half(x), _rows_in_strip(x.shape[1])
    for start in range(0, x.shape[1], step):
        end = min(start + step, x.shape[1])
        yield x[:, start:end] @ x[:, :end].transpose(1, 2)


def gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared norms made from Gram matrices, and what their error follows from; all in float64.

    Returns:
        The squared norms, the sums of the absolute values in them, and the largest squared norms of a row.
    """
    step = _rows_in_strip(left.shape[1])
    squares, bounds, diagonals = [], [], []
    for i, (a, b) in enumerate(zip(_gram_strips(left), _gram_strips(right), strict=True)):
        strip = a * b
        if i:
            strip[:, :, : i * step] *= 2  # what is left of the diagonal stands for the other half as well
        squares.append(strip.sum((1, 2), dtype=torch.float64))
        bounds.append(torch.linalg.vector_norm(strip, 1, dim=(1, 2)))
        diagonals.append([x.diagonal(i * step, 1, 2) for x in (a, b)])
    if not squares:
        nothing = torch.zeros(len(left), dtype=torch.float64, device=left.device)
        return nothing, nothing, nothing
    largest = [torch.cat(parts, 1).amax(1).double() for parts in zip(*diagonals, strict=True)]
    return torch.stack(squares).sum(0), torch.stack(bounds).double().sum(0), largest[0] + largest[1]


def gram_error_bound(
    squares: Tensor, bound: Tensor, largest: Tensor, sizes: tuple[int, ...], factors: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the error of norms made from Gram matrices.

    Args:
        squares: the squared norms.
        bound: the sums of the absolute values in them, which are rounded.
        largest: the largest squared length of a row. A product that is too small for the dtype takes up to `tiny`
            from a number of one matrix, which is then multiplied by one of the other.
        sizes: how many rows there are, and the two sides of the matrix.
        factors: what the gradients are products of. Where one of them is zero there is no error.
    """
    left, right = factors
    info = torch.finfo(torch.promote_types(left.dtype, torch.float32))
    rows, *sides = sizes
    error_bound = info.eps * bound + info.tiny * rows**2 * (sum(sides) * largest + 1)
    if not is_traced() and bool(squares.all()):
        return error_bound
    nothing = (row_max(left) == 0) | (row_max(right) == 0)
    return error_bound.where((squares != 0) | ~nothing, 0)


class Members(SampleGrads):
    """Gradients of a stack of matrices, held as the rows that met them."""

    strategy = "stacked"

    def __init__(self, left: Tensor, right: Tensor, owner: Tensor, member: Tensor, samples: int, members: int) -> None:
        kept = (owner >= 0) & (member < members)
        if not bool(kept.all()):
            left, right, owner, member = left[kept], right[kept], owner[kept], member[kept]
        self.left, self.right, self.owner, self.member = upcast_half(left), upcast_half(right), owner, member
        self.samples, self.shape = samples, (members, left.shape[1], right.shape[1])
        self.held_tensors = (self.left, self.right)

    @staticmethod
    def of(left: Tensor, right: Tensor, member: int, members: int) -> "Members":
        """Return the gradients of a stack of which one member was used alone, from the factors of that one."""
        samples, rows, _ = left.shape
        owner = torch.arange(samples, device=left.device).repeat_interleave(rows)
        return Members(left.flatten(0, 1), right.flatten(0, 1), owner, torch.full_like(owner, member), samples, members)

    def joined(self, others: Sequence["Self"]) -> "Members":
        """Concatenate the rows of several uses of one stack."""
        rows = [torch.cat(parts) for parts in zip(*(use._rows() for use in (self, *others)), strict=True)]
        left, right, owner, member = rows
        return Members(left, right, owner, member, self.samples, self.shape[0])

    def swapped(self, dims: tuple[int, int]) -> "Members | None":
        if dims != (-2, -1):
            return None
        return Members(self.right, self.left, self.owner, self.member, self.samples, self.shape[0])

    def dense(self, part: slice = ALL) -> Tensor:
        count = len(range(*part.indices(self.samples)))
        return self._padded(part).dense().view(count, *self.shape)

    def norms(self) -> Tensor:
        """Take together the pairs of sample and member with about as many rows, so that padding costs little."""
        if self.left.dtype in (torch.float64, torch.complex128):  # whose squares float64 may not hold
            return super().norms()
        members, *sides = self.shape
        out = torch.zeros(self.samples, dtype=torch.float64, device=self.left.device)
        pairs, place, counts = torch.unique(self.owner * members + self.member, return_inverse=True, return_counts=True)
        sizes = torch.frexp(counts.double()).exponent
        for size in torch.unique(sizes).tolist():
            alike = (sizes == size).nonzero().squeeze(1)
            for part in in_chunks(len(alike), sum(sides) << size):
                number = torch.full_like(pairs, -1)
                number[alike[part]] = torch.arange(len(alike[part]), device=pairs.device)
                squares = self._outer(number[place], len(alike[part])).norms().square()
                out.index_add_(0, pairs[alike[part]].div(members, rounding_mode="floor"), squares)
        return out.sqrt()

    def weighted(self, weights: Tensor) -> Tensor:
        heavy = scale_rows(self.left, weights.to(self.left.device)[self.owner])
        out = heavy.new_zeros(self.shape)
        for few, left, right in self._by_member(heavy, self.right.to(heavy)):
            out[few] = left.transpose(-1, -2) @ right
        return out

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.left, self.right, self.owner, self.member

    def _by_member(self, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield which members, and the rows that met them: all at once if padding with zeros costs little."""
        members = self.shape[0]
        counts = torch.bincount(self.member, minlength=members)
        if members * int(counts.max()) <= 2 * len(self.member):
            layout = Owners.of_rows(self.member, members)
            yield ALL, *(layout.by_sample(x, 1) for x in rows)
            return
        order = torch.argsort(self.member, stable=True)
        parts = [torch.split(x[order], counts.tolist()) for x in rows]
        for e in range(members):
            yield e, *(part[e] for part in parts)

    def _padded(self, part: slice) -> Outer:
        """Return the rows of some samples as one sum of outer products for each sample and member."""
        start, end, _ = part.indices(self.samples)
        members = self.shape[0]
        inside = (self.owner >= start) & (self.owner < end)
        number = torch.where(inside, (self.owner - start) * members + self.member, -1)
        return self._outer(number, (end - start) * members)

    def _outer(self, number: Tensor, count: int) -> Outer:
        """Return sums of outer products, given which of them each row belongs to; -1 for none."""
        rows = (number >= 0).nonzero().squeeze(1)
        layout = Owners.of_rows(number[rows], count)
        return Outer(layout.by_sample(self.left[rows], 1), layout.by_sample(self.right[rows], 1))
