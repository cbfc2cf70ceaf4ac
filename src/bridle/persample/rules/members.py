"""Stacks of matrices: experts, heads, batched products. Each row of data meets one member of the stack.

Legend: r row of data, e member of the stack, m and n the two sides of a member. The gradient of a sample at member e is
the sum over its rows r that met e of left[r, :] times right[r, :].
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._grams import Grams
from .._numbers import weighed, wide
from .._owners import Layout, NotSeparableError
from .._pieces import ALL, Dense, Piece, in_chunks
from .._use import Use
from .linear import Outer


class Members(Piece):
    """Gradients of a stack of matrices, held as the rows that met them."""

    how = "members"

    def __init__(self, left: Tensor, right: Tensor, owner: Tensor, member: Tensor, samples: int, members: int) -> None:
        kept = (owner >= 0) & (member < members)
        if not bool(kept.all()):
            left, right, owner, member = left[kept], right[kept], owner[kept], member[kept]
        self.left, self.right, self.owner, self.member = wide(left), wide(right), owner, member
        self.samples, self.shape = samples, (members, left.shape[1], right.shape[1])

    @staticmethod
    def of(outer: Outer, member: int, members: int) -> "Members":
        """Return the gradients of a stack of which one member was used alone."""
        owner = torch.arange(outer.samples, device=outer.left.device).repeat_interleave(outer.rows)
        left, right = outer.left.flatten(0, 1), outer.right.flatten(0, 1)
        return Members(left, right, owner, torch.full_like(owner, member), outer.samples, members)

    @staticmethod
    def joined(pieces: Sequence["Members"]) -> "Members":
        """Put several uses of one stack behind each other."""
        parts = [torch.cat(found) for found in zip(*(piece._rows() for piece in pieces), strict=True)]
        left, right, owner, member = parts
        return Members(left, right, owner, member, pieces[0].samples, pieces[0].shape[0])

    def transposed(self) -> "Members":
        """Return the same for the transposed matrices."""
        return Members(self.right, self.left, self.owner, self.member, self.samples, self.shape[0])

    def dense(self, part: slice = ALL) -> Tensor:  # noqa: D102
        count = len(range(*part.indices(self.samples)))
        return self._padded(part).dense().view(count, *self.shape)

    def squared_norms(self, grams: Grams | None = None) -> Tensor:  # noqa: ARG002
        """Take together the pairs of sample and member with about as many rows, so that padding costs little."""
        members, *sides = self.shape
        out = torch.zeros(self.samples, dtype=torch.float64, device=self.left.device)
        pairs, place, counts = torch.unique(self.owner * members + self.member, return_inverse=True, return_counts=True)
        sizes = torch.frexp(counts.double()).exponent
        for size in torch.unique(sizes).tolist():
            alike = (sizes == size).nonzero().squeeze(1)
            for part in in_chunks(len(alike), sum(sides) << size):
                number = torch.full_like(pairs, -1)
                number[alike[part]] = torch.arange(len(alike[part]), device=pairs.device)
                found = self._outer(number[place], len(alike[part])).squared_norms()
                out.index_add_(0, pairs[alike[part]].div(members, rounding_mode="floor"), found)
        return out

    def weighted(self, weights: Tensor) -> Tensor:  # noqa: D102
        heavy = weighed(self.left, weights.to(self.left.device)[self.owner])
        out = heavy.new_zeros(self.shape)
        for few, left, right in self._by_member(heavy, self.right.to(heavy)):
            out[few] = left.transpose(-1, -2) @ right
        return out

    def dot(self, direction: Tensor) -> Tensor:  # noqa: D102
        if self.left.is_complex():
            return super().dot(direction)
        out = torch.zeros(self.samples, dtype=torch.float64, device=self.left.device)
        matrices = direction.to(self.left)
        for few, left, right, owner in self._by_member(self.left, self.right, self.owner[:, None]):
            products = ((left @ matrices[few]) * right).sum(-1, dtype=torch.float64)
            out.index_add_(0, owner.reshape(-1), products.reshape(-1))
        return out

    def holds(self) -> tuple[Tensor, ...]:  # noqa: D102
        return self.left, self.right

    def saving(self) -> float:  # noqa: D102
        return 0.0

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.left, self.right, self.owner, self.member

    def _by_member(self, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield which members, and the rows that met them: all at once if padding with zeros costs little."""
        members = self.shape[0]
        counts = torch.bincount(self.member, minlength=members)
        if members * int(counts.max()) <= 2 * len(self.member):
            layout = Layout(members, None, self.member)
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
        layout = Layout(count, None, number[rows])
        return Outer(layout.by_sample(self.left[rows], 1), layout.by_sample(self.right[rows], 1))


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
