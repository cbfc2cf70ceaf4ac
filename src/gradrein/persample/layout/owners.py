"""Owners of a tensor's elements, as far as structure alone tells.

An element is owned by the one sample whose loss can send it a gradient, whatever the values in the graph are. Owners
are integers in a tensor that broadcasts to the shape it describes, so that they stay small: a batch of images needs one
number per image.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from .samples import SampleLayout

# In place of an owner: no loss can reach the element; it is not proved that only one can.
UNREACHED, MIXED = -1, -2
_NO_OWNER_YET = torch.iinfo(torch.int32).max
# A reshape that would take more elements than this proves nothing.
_AT_MOST = 1 << 25


@dataclass(frozen=True, eq=False)
class Owners:
    """Owners of the elements of one tensor.

    Attributes:
        ids: the owners, on the CPU; each dimension has the size of the tensor's, or 1 where owners do not vary.
        shape: the shape of the tensor.
    """

    ids: Tensor
    shape: tuple[int, ...]

    @staticmethod
    def of(ids: Tensor, shape: Sequence[int]) -> "Owners":
        """Return owners, with dimensions along which they do not vary folded to size 1."""
        if not ids.numel():
            return Owners.all(UNREACHED, shape)
        for dim, size in enumerate(ids.shape):
            if size > 1:
                first = ids.narrow(dim, 0, 1)
                ids = first if bool((ids == first).all()) else ids
        return Owners(ids, tuple(shape))

    @staticmethod
    def all(owner: int, shape: Sequence[int]) -> "Owners":
        """Return the same owner for every element."""
        owners = Owners(torch.full((1,) * len(shape), owner, dtype=torch.int32, device="cpu"), tuple(shape))
        owners.__dict__["is_empty"] = owner == UNREACHED  # known: most outputs of most ops have nobody
        return owners

    @staticmethod
    def of_layout(layout: SampleLayout, shape: Sequence[int]) -> "Owners":
        """Return owners that were found in another way than by proof."""
        count = prod(shape)
        if layout.owners is not None and layout.owners.numel() != count:
            return Owners.all(UNREACHED, shape)
        ids = layout.owner_of_each(count, torch.device("cpu")) if layout.seen is None else layout.seen
        return Owners.of(ids.to("cpu", torch.int32).reshape(tuple(shape)), shape)

    @cached_property
    def is_empty(self) -> bool:
        """Whether no loss can reach any element."""
        return bool((self.ids == UNREACHED).all())

    @cached_property
    def is_proved(self) -> bool:
        """Whether at most one loss can reach each element."""
        return bool((self.ids != MIXED).all())

    @cached_property
    def varies(self) -> bool:
        """Whether each element has at most one owner, and not all have the same."""
        somebody = self.ids[self.ids != UNREACHED]
        return self.is_proved and somebody.numel() > 0 and bool((somebody != somebody[0]).any())

    @cached_property
    def is_uneven(self) -> bool:
        """Whether some element may be reached by other losses than another is."""
        somebody = self.ids[self.ids != UNREACHED]
        return somebody.numel() > 1 and bool((somebody != somebody[0]).any())

    def folded(self) -> "Owners":
        """Return the same with dimensions along which owners do not vary folded to size 1."""
        return Owners.of(self.ids, self.shape)

    def merged(self, other: "Owners") -> "Owners":
        """Return the owners of a sum of two gradients."""
        a, b = self.ids, other.ids
        one = torch.where(a == UNREACHED, b, torch.where((b == UNREACHED) | (a == b), a, MIXED))
        return Owners.of(one, self.shape)

    def mixed(self, dims: Iterable[int]) -> "Owners":
        """Return the owners where every element along these dimensions may send its gradient to every other."""
        wanted = sorted({dim % len(self.shape) for dim in dims}) if self.shape else []
        return Owners(_merge(self.ids, wanted), self.shape)

    def everywhere(self, shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor each of whose elements may get a gradient from all of these."""
        return Owners(_merge(self.ids, range(self.ids.dim())).reshape((1,) * len(shape)), tuple(shape))

    def summed_to(self, shape: Sequence[int]) -> "Owners":
        """Return the owners of a tensor that was broadcast to this one."""
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

    def layout(self, samples: int) -> SampleLayout:
        """Return the proved owners in the form that rules use."""
        if self.is_empty or not prod(self.shape):
            return SampleLayout.empty(samples)
        varying = [dim for dim, size in enumerate(self.ids.shape) if size > 1]
        first, last = (varying[0], varying[-1] + 1) if varying else (0, 0)
        line = (
            self.ids.squeeze()
            if first == last
            else self.ids.expand(*self.ids.shape[:first], *self.shape[first:last], *self.ids.shape[last:])
        )
        return SampleLayout.of_line(samples, line.reshape(-1).long(), prod(self.shape[last:]), prod(self.shape[:first]))


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
