"""Which sample owns which element of a tensor, how owners go through a graph, and how to cut a tensor by them.

An element is owned by the one sample whose loss can send it a gradient, whatever the values in the graph are. Owners
are integers in a tensor that broadcasts to the shape it describes, so that they stay small: a batch of images needs one
number per image.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from .tracing import structure

# In place of an owner: no loss can reach the element; it is not proved that only one can.
UNREACHED, MIXED = -1, -2
_NO_OWNER_YET = torch.iinfo(torch.int32).max
# A reshape that would take more elements than this proves nothing.
_AT_MOST = 1 << 25


class NotSeparableError(Exception):
    """A way of cutting a tensor was asked for that would cut through a sample's elements."""


@dataclass(frozen=True, eq=False)
class Owners:
    """Owners of the elements of one tensor.

    Attributes:
        ids: the owners, on the CPU; each dimension has the size of the tensor's, or 1 where owners do not vary.
        shape: the shape of the tensor.
        samples: how many samples there are, where a tensor is to be cut into them.
    """

    ids: Tensor
    shape: tuple[int, ...]
    samples: int = 0

    @staticmethod
    def of(ids: Tensor, shape: Sequence[int]) -> "Owners":
        """Return owners, with dimensions along which they do not vary folded to size 1."""
        if not ids.numel():
            return Owners.all(UNREACHED, shape)
        for dim in reversed(range(ids.dim())):  # samples are told apart by the first dimensions: the others go soonest
            if ids.shape[dim] > 1:
                first = ids.narrow(dim, 0, 1)
                ids = first if bool((ids == first).all()) else ids
        return Owners(ids, tuple(shape))

    @staticmethod
    def all(owner: int, shape: Sequence[int]) -> "Owners":
        """Return the same owner for every element."""
        owners = Owners(torch.full((1,) * len(shape), owner, dtype=torch.int32, device="cpu"), tuple(shape))
        owners.__dict__["is_empty"] = owner == UNREACHED or 0 in shape  # known: most outputs of most ops have nobody
        return owners

    @staticmethod
    def of_rows(ids: Tensor, samples: int) -> "Owners":
        """Return the owners of the rows of a matrix, one for each; below zero is nobody."""
        return Owners(ids.to("cpu"), tuple(ids.shape), samples)

    @cached_property
    def is_empty(self) -> bool:
        """Whether no loss can reach any element."""
        with structure():
            return not prod(self.shape) or bool((self.ids == UNREACHED).all())

    @cached_property
    def is_proved(self) -> bool:
        """Whether at most one loss can reach each element."""
        return bool((self.ids != MIXED).all())

    @property
    def varies(self) -> bool:
        """Whether each element has at most one owner, and not all have the same."""
        return self.is_proved and self.is_uneven

    @cached_property
    def is_uneven(self) -> bool:
        """Whether some element may be reached by other losses than another is."""
        somebody = self.ids[self.ids != UNREACHED]
        return somebody.numel() > 1 and bool((somebody != somebody[0]).any())

    def merged(self, other: "Owners") -> "Owners":
        """Return the owners of a sum of two gradients."""
        a, b = self.ids, other.ids
        one = torch.where(a == UNREACHED, b, torch.where((b == UNREACHED) | (a == b), a, MIXED))
        return Owners.of(one, self.shape)

    def mixed(self, dims: Iterable[int]) -> "Owners":
        """Return the owners where every element along these dimensions may send its gradient to every other."""
        wanted = sorted({dim % len(self.shape) for dim in dims}) if self.shape else []
        return Owners(_merge(self.ids, wanted), self.shape)

    def line(self, *dims: int) -> "Owners":
        """Return the owners of all that has one index along a dimension, or along several, for each such index."""
        kept = sorted({dim % len(self.shape) for dim in dims})
        apart = self.mixed(dim for dim in range(len(self.shape)) if dim not in kept).ids
        return Owners(apart.reshape([apart.shape[dim] for dim in kept]), tuple(self.shape[dim] for dim in kept))

    def everywhere(self, shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor each of whose elements may get a gradient from all of these."""
        return Owners(_merge(self.ids, range(self.ids.dim())).reshape((1,) * len(shape)), tuple(shape))

    def summed_to(self, shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor that was broadcast to this one."""
        if tuple(shape) == self.shape:
            return self
        extra = len(self.shape) - len(shape)
        full = (1,) * extra + tuple(shape)
        ids = _merge(self.ids, [d for d, size in enumerate(full) if size == 1])
        return Owners(ids.reshape(ids.shape[extra:]), tuple(shape))

    def reshaped(self, shape: Sequence[int]) -> "Owners":
        """Return the owners of the same elements, counted in row-major order, under another shape."""
        if prod(self.shape) == 0:
            return Owners.all(UNREACHED, shape)
        wide: list[int] = []
        narrow: list[int] = []
        for old, new in _groups(self.shape, shape):
            constant = all(self.ids.shape[d] == 1 for d in old)
            wide += [1 if constant else self.shape[d] for d in old]
            narrow += [1 if constant else shape[d] for d in new]
        if prod(wide) > _AT_MOST:
            return Owners.all(MIXED, shape)
        return Owners.of(self.ids.expand(wide).reshape(narrow), shape)

    def permuted(self, dims: Sequence[int]) -> "Owners":
        """Return the owners of the tensor whose dimensions were put into the order `dims` to make this one."""
        back = sorted(range(len(dims)), key=lambda i: dims[i] % len(dims))
        return Owners(self.ids.permute(back), tuple(self.shape[d] for d in back))

    def without(self, dims: Sequence[int], shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor of `shape` that was reduced over `dims`, which are gone here."""
        ids = self.ids
        for dim in sorted(d % len(shape) for d in dims):
            ids = ids.unsqueeze(dim)
        return Owners(ids, tuple(shape))

    def part(self, dim: int, start: int, size: int) -> "Owners":
        """Return the owners of `size` elements along a dimension."""
        ids = self.ids if self.ids.shape[dim] == 1 else self.ids.narrow(dim, start, size)
        return Owners.of(ids, (*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def placed(self, dim: int, where: slice, shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor of which this one is the part `where` along a dimension."""
        sizes = list(self.ids.shape)
        sizes[dim] = shape[dim]
        ids = torch.full(sizes, UNREACHED, dtype=torch.int32, device="cpu")
        ids[(slice(None),) * dim + (where,)] = self.ids
        return Owners.of(ids, shape)

    def picked(self, dim: int, index: Tensor) -> "Owners":
        """Return the owners of a tensor whose slices along a dimension were added to those of this one at `index`."""
        ids = self.ids if self.ids.shape[dim] == 1 else self.ids.index_select(dim, index)
        return Owners.of(ids, (*self.shape[:dim], len(index), *self.shape[dim + 1 :]))

    def collected(self, dim: int, index: Tensor, shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor of `shape` whose slices at `index` along a dimension make up this one."""
        sizes = [len(index) if d == dim else size for d, size in enumerate(self.ids.shape)]
        ids = self.ids.expand(sizes)
        where = index.view([-1 if d == dim else 1 for d in range(len(sizes))]).expand(sizes)
        sizes[dim] = shape[dim]
        highest = torch.full(sizes, UNREACHED, dtype=torch.int32, device="cpu").scatter_reduce(dim, where, ids, "amax")
        lowest = torch.full(sizes, _NO_OWNER_YET, dtype=torch.int32, device="cpu")
        lowest = lowest.scatter_reduce(dim, where, torch.where(ids == UNREACHED, _NO_OWNER_YET, ids), "amin")
        return Owners.of(_one_of(highest, lowest), shape)

    def each(self, device: torch.device) -> Tensor:
        """Return the owner of each element, below zero where it has none."""
        with structure():
            return self.ids.expand(self.shape).long().to(device)

    def along(self, dims: Iterable[int], device: torch.device) -> Tensor:
        """Return the one owner of all that has one index along some dimensions, for each such index.

        Raises:
            NotSeparableError: there are several.
        """
        with structure():
            line = self.line(*dims)
            if not line.is_proved:
                raise NotSeparableError
            return line.each(device).reshape(-1)

    @cached_property
    def block(self) -> int | None:
        """If element e, counted in row-major order, belongs to sample ``(e // block) % samples`` unless to nobody.

        Batch first, batch second and a folded batch are all of this kind, and reshaping does not change it. None for
        owners in any other order.
        """
        if self.is_empty:
            return None
        with structure():
            varying = [dim for dim, size in enumerate(self.ids.shape) if size > 1]
            first, last = (varying[0], varying[-1] + 1) if varying else (0, 0)
            sizes = [size if first <= dim < last else 1 for dim, size in enumerate(self.shape)]
            fitting = fitting_blocks(self.ids.expand(sizes).reshape(-1), self.samples)
            return fitting[0] * prod(self.shape[last:]) if fitting else None

    @cached_property
    def transposed(self) -> "Owners":
        """The owners of the transposed matrix."""
        with structure():
            return Owners(self.ids.T, self.shape[::-1], self.samples)

    def by_sample(self, x: Tensor, width: int) -> Tensor:
        """Cut ``x`` into rows of `width` elements of the owners and return them as (samples, rows, rest).

        `x` has one row for each row of the tensor these owners describe, of any width of its own. Where
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

        `x` has as many elements as the tensor these owners describe, and `shape` broadcasts to its shape.
        """
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
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

    def _batch_first(self, x: Tensor) -> tuple[int, Tensor] | None:
        """Move the samples to the front if one dimension of `x` holds them: which one, and the result."""
        if self.block is None:
            return None
        after = x.numel()
        for dim, size in enumerate(x.shape):
            after //= max(size, 1)
            if self.block % after == 0 and size % (self.samples * (inner := self.block // after)) == 0:
                if dim == 0 and size == self.samples * inner:
                    return 0, x.reshape(self.samples, inner, *x.shape[1:])
                cut = x.reshape(*x.shape[:dim], -1, self.samples, inner, *x.shape[dim + 1 :])
                moved = cut.movedim(dim + 1, 0)
                return dim, moved.reshape(self.samples, *x.shape[:dim], -1, *x.shape[dim + 1 :])
        return None

    @cached_property
    def _places(self) -> dict[Any, Any]:
        return {}

    def _cell_places(
        self, full: tuple[int, ...], shape: tuple[int, ...], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the elements that have an owner, and the place of each among the cells of all samples."""
        key = (full, shape, device)
        if key not in self._places:
            owner = self.each(self.ids.device).reshape(-1)
            cells = torch.arange(prod(shape), device="cpu").view(shape).expand(full).reshape(-1)
            kept = (owner >= 0).nonzero().squeeze(1)
            self._places[key] = kept.to(device), (owner[kept] * prod(shape) + cells[kept]).to(device)
        places: tuple[Tensor, Tensor] = self._places[key]
        return places

    def _row_places(self, width: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
        """Return the rows that have an owner, their places among all rows by sample, and how many of these each has."""
        if (width, device) not in self._places:
            rows = self.each(self.ids.device).reshape(-1, width)
            owner = rows.amax(1)
            if not bool(((rows == owner[:, None]) | (rows < 0)).all()):
                raise NotSeparableError
            kept = (owner >= 0).nonzero().squeeze(1)
            kept = kept[torch.argsort(owner[kept], stable=True)]
            counts = torch.bincount(owner[kept], minlength=self.samples)
            first = counts.cumsum(0) - counts  # of the rows of each sample, among those that are kept
            most = int(counts.max())
            places = owner[kept] * most + torch.arange(len(kept), device="cpu") - first[owner[kept]]
            self._places[width, device] = kept.to(device), places.to(device), most
        known: tuple[Tensor, Tensor, int] = self._places[width, device]
        return known


def _merge(ids: Tensor, dims: Iterable[int]) -> Tensor:
    """Merge owners along dimensions, which stay with size 1."""
    few = [dim for dim in dims if ids.shape[dim] > 1]
    if not few:
        return ids
    return _one_of(
        ids.amax(few, keepdim=True), torch.where(ids == UNREACHED, _NO_OWNER_YET, ids).amin(few, keepdim=True)
    )


def _one_of(highest: Tensor, lowest: Tensor) -> Tensor:
    """Return the owner where the highest of several and the lowest, of those that are somebody's, are one."""
    one = torch.where(lowest == highest, highest, MIXED)
    return torch.where((highest == UNREACHED) & (lowest > MIXED), UNREACHED, one).to(torch.int32)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[range, range]]:
    """Split two shapes of one size into the shortest runs of dimensions with equal products."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        start, begin = i, j
        a, b = (old[i] if i < len(old) else 1), (new[j] if j < len(new) else 1)
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        groups.append((range(start, i), range(begin, j)))
    return groups


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
