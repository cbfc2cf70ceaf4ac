"""Which sample owns which element, and how to cut a tensor accordingly."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..tracing import structure


class NotSeparableError(Exception):
    """A way of cutting a tensor was asked for that would cut through a sample's elements."""


@dataclass(frozen=True, eq=False)
class SampleLayout:
    """Which sample owns each element of a tensor, counted in row-major order.

    Attributes:
        samples: how many samples there are.
        block: when not None, element e belongs to sample ``(e // block) % samples``. Batch first, batch
            second and a folded batch are all of this kind, and reshaping does not change it.
        owners: otherwise the owner of each element, -1 where the gradient is zero.
        seen: where `block` covers elements whose gradient is zero too, the owners of the others.
    """

    samples: int
    block: int | None
    owners: Tensor | None
    seen: Tensor | None = None

    @staticmethod
    def empty(samples: int) -> "SampleLayout":
        """Return the layout of an output that gets no gradient."""
        return SampleLayout(samples, None, torch.empty(0, dtype=torch.long, device="cpu"))

    @staticmethod
    def of_line(samples: int, line: Tensor, inner: int, outer: int) -> "SampleLayout":
        """Return the layout in which element e belongs to ``line[(e // inner) % len(line)]``; -1 is nobody."""
        blocks = fitting_blocks(line, samples)
        if blocks:
            return SampleLayout(samples, blocks[0] * inner, None)
        return SampleLayout(samples, None, line.repeat_interleave(inner).repeat(outer))

    def by_sample(self, x: Tensor, width: int) -> Tensor:
        """Cut ``x`` into rows of `width` elements of the layout and return them as (samples, rows, rest).

        `x` has one row for each row of the tensor this layout describes, of any width of its own. Where
        samples own different numbers of rows, zeros fill up.
        """
        if self.block is not None:
            if self.block % width:
                raise NotSeparableError
            inner = self.block // width
            outer = prod(x.shape[:-1]) // (self.samples * inner)
            if outer == 1:
                return x.reshape(self.samples, inner, x.shape[-1])
            rows = x.reshape(outer, self.samples, inner, x.shape[-1])
            return rows.transpose(0, 1).reshape(self.samples, outer * inner, x.shape[-1])
        with structure():
            kept, places, most = self._row_places(width, x.device)
        flat = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        out = flat.new_zeros(self.samples * most, x.shape[-1])
        return out.index_copy_(0, places, flat[kept]).view(self.samples, most, x.shape[-1])

    def sums(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Sum the elements of `x` that belong together into (samples, *shape); half types in float32.

        `x` has as many elements as the tensor this layout describes, and `shape` broadcasts to its shape.
        """
        rows = self._rows_each(x, shape)
        if rows == 1:
            return x.reshape(self.samples, *shape)
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if rows:
            return x.reshape(self.samples, rows, *shape).sum(1)
        apart = self._batch_first(x)
        if apart is not None:
            dim, moved = apart
            full = (1,) * (x.dim() - len(shape)) + tuple(shape)
            if full[dim] == 1:
                over = [i + 1 for i, n in enumerate(full) if n == 1 and moved.shape[i + 1] != 1]
                return (moved.sum(over, keepdim=True) if over else moved).reshape(self.samples, *shape)
        with structure():
            kept, places = self._cell_places(tuple(x.shape), tuple(shape), x.device)
        out = x.new_zeros(self.samples * prod(shape))
        out.index_add_(0, places, x.reshape(-1)[kept])
        return out.view(self.samples, *shape)

    def _rows_each(self, x: Tensor, shape: Sequence[int]) -> int:
        """Return how many rows of `x` of this very shape each sample owns, one after another; 0 where it is not so."""
        size = prod(shape)
        if self.block is None or self.block * self.samples != x.numel() or not size or self.block % size:
            return 0
        return self.block // size if x.shape[x.dim() - len(shape) :] == tuple(shape) else 0

    def owner_of_each(self, count: int, device: torch.device) -> Tensor:
        """Return the owner of each of the `count` elements."""
        if self.owners is not None:
            return self.owners.to(device)
        assert self.block is not None
        return torch.arange(count, device=device).div(self.block, rounding_mode="floor") % self.samples

    @cached_property
    def is_empty(self) -> bool:
        """Whether nobody owns anything: the gradient is zero everywhere."""
        with structure():
            return self.owners is not None and not bool((self.owners >= 0).any())

    def is_whole_along(self, stride: int, extent: int) -> bool:
        """Return whether elements that differ only along one dimension always have one owner."""
        if self.samples == 1:
            return True
        if self.block is None:
            return False
        return self.block % (stride * extent) == 0 or stride % (self.block * self.samples) == 0

    def _batch_first(self, x: Tensor) -> tuple[int, Tensor] | None:
        """Move the samples to the front if one dimension of `x` holds them: which one, and the result."""
        if self.block is None:
            return None
        after = x.numel()
        for dim, size in enumerate(x.shape):
            after //= max(size, 1)
            if self.block % after == 0 and size % (self.samples * (inner := self.block // after)) == 0:
                cut = x.reshape(*x.shape[:dim], -1, self.samples, inner, *x.shape[dim + 1 :])
                moved = cut.movedim(dim + 1, 0)
                return dim, moved.reshape(self.samples, *x.shape[:dim], -1, *x.shape[dim + 1 :])
        return None

    def _cell_places(
        self, full: tuple[int, ...], shape: tuple[int, ...], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the elements that have an owner, and the place of each among the cells of all samples."""
        key = (full, shape, device)
        if key not in self._places:
            owner = self.owner_of_each(prod(full), torch.device("cpu"))
            cells = torch.arange(prod(shape), device="cpu").view(shape).expand(full).reshape(-1)
            kept = (owner >= 0).nonzero().squeeze(1)
            self._places[key] = kept.to(device), (owner[kept] * prod(shape) + cells[kept]).to(device)
        places: tuple[Tensor, Tensor] = self._places[key]
        return places

    def _row_places(self, width: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Return the rows that have an owner, their places among all rows by sample, and how many of these each has."""
        if (width, device) not in self._places:
            assert self.owners is not None
            rows = self.owners.to("cpu").view(-1, width)
            owner = rows.amax(1)
            if not bool(((rows == owner[:, None]) | (rows < 0)).all()):
                raise NotSeparableError
            counts = torch.bincount(owner.clamp(min=0), weights=(owner >= 0).double(), minlength=self.samples)
            most = int(counts.max())
            order = torch.argsort(owner, stable=True)
            sorted_owner = owner[order]
            first = torch.searchsorted(sorted_owner, sorted_owner)
            rank = torch.arange(len(owner), device="cpu") - first
            places = torch.full_like(owner, -1)
            places[order] = torch.where(sorted_owner >= 0, sorted_owner * most + rank, -1)
            kept = (places >= 0).nonzero().squeeze(1)
            self._places[width, device] = kept.to(device), places[kept].to(device), most
        known: tuple[Tensor, Tensor, int] = self._places[width, device]
        return known

    @cached_property
    def _places(self) -> dict[Any, Any]:
        return {}


def fitting_blocks(owners: Tensor, samples: int) -> list[int]:
    """Return every block size under which the owners seen are right, the largest first."""
    if owners.numel() % samples:
        return []
    whole = owners.numel() // samples
    if samples == 1:
        return [whole]
    few = torch.arange(0, owners.numel(), max(1, owners.numel() // 4096), device=owners.device)
    owner = owners[few]
    number = torch.arange(samples, device=owners.device, dtype=owners.dtype)[:, None]
    fitting = []
    for block in _divisors(whole):
        if bool(((few // block % samples == owner) | (owner < 0)).all()):
            cut = owners.view(-1, samples, block)
            if bool(((cut == number) | (cut < 0)).all()):
                fitting.append(block)
    return fitting


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)
