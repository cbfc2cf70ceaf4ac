"""Gradients of the members of a stack of matrices, such as experts or heads.

Legend: r row of data, e the member that it met. The gradient of a sample at a member is the sum over the rows that met
it of left[r, :] times right[r, :].
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
        own = torch.arange(self.samples, device=self.owner.device)[part]
        pairs = own[:, None] + torch.arange(self.shape[0], device=own.device) * self.samples
        return self._outer(pairs.flatten()).dense().view(len(own), *self.shape)

    def norms(self) -> Tensor:
        """Take together the pairs of sample and member with about as many rows, so that padding costs little."""
        if self.left.dtype in (torch.float64, torch.complex128):  # whose squares float64 may not hold
            return super().norms()
        out = torch.zeros(self.samples, dtype=torch.float64, device=self.left.device)
        pairs, counts = torch.unique_consecutive(self._by_pair.values, return_counts=True)
        sizes = torch.frexp(counts.double()).exponent
        for size in torch.unique(sizes).tolist():
            alike = pairs[sizes == size]
            for part in in_chunks(len(alike), sum(self.shape[1:]) << size):
                out.index_add_(0, alike[part] % self.samples, self._outer(alike[part]).norms().square())
        return out.sqrt()

    def weighted(self, weights: Tensor) -> Tensor:
        left = scale_rows(self.left, weights.to(self.left.device)[self.owner])
        right, out = self.right.to(left), left.new_zeros(self.shape)
        if bool((self.member[1:] < self.member[:-1]).any()):
            left, right = (x.index_select(0, self._by_pair.indices) for x in (left, right))
        counts = torch.bincount(self.member, minlength=len(out)).tolist()
        if len(set(counts)) == 1:
            left, right = (x.view(len(out), counts[0], x.shape[1]) for x in (left, right))
            return left.transpose(1, 2) @ right
        for one, a, b in zip(out, torch.split(left, counts), torch.split(right, counts), strict=True):
            torch.mm(a.T, b, out=one)
        return out

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.left, self.right, self.owner, self.member

    @cached_property
    def _by_pair(self) -> Any:
        """The pair of member and sample of each row, members first, in order; and where in the rows each of them is."""
        return torch.sort(self.member * self.samples + self.owner, stable=True)

    def _outer(self, pairs: Tensor) -> Outer:
        """Return the sum of outer products of each of some pairs of member and sample; rows of zeros fill up."""
        start, end = (torch.searchsorted(self._by_pair.values, pairs, right=end)[:, None] for end in (False, True))
        places = start + torch.arange(int((end - start).max()), device=pairs.device)
        beyond = (places >= end).flatten().nonzero().squeeze(1)
        rows = self._by_pair.indices[places.clamp(max=len(self.member) - 1).flatten()]
        left, right = (x.index_select(0, rows).index_fill_(0, beyond, 0) for x in (self.left, self.right))
        return Outer(left.view(*places.shape, left.shape[1]), right.view(*places.shape, right.shape[1]))
