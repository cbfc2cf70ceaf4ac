"""Gradients of the members of a stack of matrices, such as experts or heads.

Legend: r row of data, e the member that it met. The gradient of a sample at a member is the sum over the rows that met
it of left[r, :] times right[r, :].
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Owners
from .base import ALL, Outer, SampleGrads, in_chunks
from .numerics import scale_rows, upcast_half

if TYPE_CHECKING:
    from typing_extensions import Self


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
