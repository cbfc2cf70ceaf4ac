"""Who owns which element: asked of the engine, not assumed.

The gradient at an element is linear in the losses it comes from. Weigh the losses, then weigh them again with
sample i's weight multiplied by a power of two of its own. An element that belongs to one sample is multiplied
by exactly that power (such a multiplication commutes with every rounding); an element that several samples
share is not. The first weights are random, so that equal samples cannot conspire to look like one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import graph
from . import _torch
from ._pieces import wide


class NotSeparableError(Exception):
    """A way of cutting a tensor was asked for that would cut through a sample's elements."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which sample owns each element of a tensor, counted in row-major order.

    Attributes:
        samples: how many samples there are.
        block: when not None, element e belongs to sample ``(e // block) % samples``. Batch first, batch
            second and a folded batch are all of this kind, and reshaping does not change it.
        owners: otherwise the owner of each element, -1 where the gradient is zero.
        certain: whether the elements seen allow no other answer, so that it may be used for the next graph
            of the same form.
    """

    samples: int
    block: int | None
    owners: Tensor | None
    certain: bool

    def by_sample(self, x: Tensor, width: int) -> Tensor:
        """Cut ``x`` into rows of `width` elements of the layout and return them as (samples, rows, rest).

        `x` has one row for each row of the tensor this layout describes, of any width of its own. Where
        samples own different numbers of rows, zeros fill up.
        """
        if self.block is not None:
            if self.block % width:
                raise NotSeparableError
            inner = self.block // width
            rows = x.reshape(-1, self.samples, inner, x.shape[-1])
            if rows.shape[0] == 1:
                return rows[0]
            return rows.transpose(0, 1).reshape(self.samples, -1, x.shape[-1])
        where, most = self._row_places(width)
        flat = x.reshape(-1, x.shape[-1])
        kept = where >= 0
        out = flat.new_zeros(self.samples * most, x.shape[-1])
        return out.index_copy_(0, where[kept], flat[kept]).view(self.samples, most, x.shape[-1])

    def sums(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Sum the elements of `x` that belong together into (samples, *shape).

        `x` has as many elements as the tensor this layout describes, and `shape` broadcasts to its shape.
        """
        apart = self._batch_first(x)
        if apart is not None:
            dim, moved = apart
            full = (1,) * (x.dim() - len(shape)) + tuple(shape)
            if full[dim] == 1:
                over = [i + 1 for i, n in enumerate(full) if n == 1 and moved.shape[i + 1] != 1]
                return (moved.sum(over, keepdim=True) if over else moved).reshape(self.samples, *shape)
        cells = torch.arange(_count(shape), device=x.device).view(tuple(shape)).expand(x.shape).reshape(-1)
        owner = self.owner_of_each(x.numel(), x.device)
        kept = owner >= 0
        out = x.new_zeros(self.samples * _count(shape))
        out.index_add_(0, owner[kept] * _count(shape) + cells[kept], x.reshape(-1)[kept])
        return out.view(self.samples, *shape)

    def owner_of_each(self, count: int, device: torch.device) -> Tensor:
        """Return the owner of each of the `count` elements."""
        if self.owners is not None:
            return self.owners
        assert self.block is not None
        return torch.arange(count, device=device).div(self.block, rounding_mode="floor") % self.samples

    @property
    def is_empty(self) -> bool:
        """Whether nobody owns anything: the gradient is zero everywhere."""
        return self.owners is not None and not bool((self.owners >= 0).any())

    def is_whole_along(self, stride: int, extent: int) -> bool:
        """Tell whether elements that differ only along one dimension always have one owner."""
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

    def _row_places(self, width: int) -> tuple[Tensor, int]:
        if width not in self._places:
            assert self.owners is not None
            rows = self.owners.view(-1, width)
            owner = rows.amax(1)
            if not bool(((rows == owner[:, None]) | (rows < 0)).all()):
                raise NotSeparableError
            counts = torch.bincount(owner.clamp(min=0), weights=(owner >= 0).double(), minlength=self.samples)
            most = int(counts.max())
            order = torch.argsort(owner, stable=True)
            sorted_owner = owner[order]
            first = torch.searchsorted(sorted_owner, sorted_owner)
            rank = torch.arange(len(owner), device=owner.device) - first
            places = torch.full_like(owner, -1)
            places[order] = torch.where(sorted_owner >= 0, sorted_owner * most + rank, -1)
            self._places[width] = places, most
        return self._places[width]

    @cached_property
    def _places(self) -> dict[int, tuple[Tensor, int]]:
        return {}


def probe(root: Tensor, sample_of: Tensor, samples: int, edges: Sequence[GradientEdge]) -> list[Layout | None]:
    """Find who owns what at each edge.

    Args:
        root: one loss per entry.
        sample_of: which sample each entry of `root` counts for.
        samples: how many samples there are.
        edges: where to look.

    Returns:
        One layout per edge; None where samples share elements.
    """
    generator = torch.Generator().manual_seed(20)
    base = (1 + torch.rand(samples, generator=generator, dtype=torch.float64)).to(root)
    # Half precision has few exponents: spread the number over more calls.
    half = any(out.dtype == torch.float16 for node in graph.reachable([root]) for out in graph.describe(node))
    levels, lift = (8, 11) if half else (32, 64)
    first, found = _owners(root, base, sample_of, edges, levels)
    missed = {i: owners for i, owners in enumerate(found) if owners is not None and bool((owners == _LOST).any())}
    if missed:  # too small to be told apart: ask again with everything larger, also by a power of two
        lifted = torch.ldexp(base, torch.tensor(lift))
        _, again = _owners(root, lifted, sample_of, [edges[i] for i in missed], levels)
        for (i, owners), larger in zip(missed.items(), again, strict=True):
            if larger is not None:
                found[i] = torch.where((owners == _LOST) & (larger != _ZERO), larger, owners)
    return [_layout(a, owners, samples) for a, owners in zip(first, found, strict=True)]


# What stands in the place of an owner: nothing to own, too small to be told whose, owned by several.
_ZERO, _LOST, _SHARED = -1, -2, -3


def _owners(
    root: Tensor, base: Tensor, sample_of: Tensor, edges: Sequence[GradientEdge], levels: int
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Return the gradients under the weights `base`, and the owner of each of their elements."""
    samples = len(base)
    digits = max(1, ceil(log(max(samples, 2)) / log(levels) - 1e-9))
    first = _torch.gradients_at(root, base[sample_of], edges)
    number = torch.arange(samples, device=root.device)
    found: list[Tensor | None] = [None] * len(edges)
    for digit in range(digits):
        exponent = number.div(levels**digit, rounding_mode="floor") % levels
        scale = torch.ldexp(base, exponent - levels // 2)
        second = _torch.gradients_at(root, scale[sample_of], edges)
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            if a is not None and b is not None:
                seen = _exponents(a.detach(), b.detach(), levels)
                before = found[i]
                found[i] = seen if before is None else _join(before, seen, levels**digit)
    return first, found


def _exponents(a: Tensor, b: Tensor, levels: int) -> Tensor:
    """Return for each element which power of two it was multiplied by, counted from 0."""
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    # Below this a product may have lost digits to underflow.
    tiny = torch.finfo(a.dtype).tiny * 2 ** (4 if a.dtype == torch.float16 else 26)
    a, b = wide(a.reshape(-1)), wide(b.reshape(-1))
    size = a.abs()
    seen = (size > tiny) & (size < torch.inf)
    fraction_a, exponent_a = torch.frexp(a)
    fraction_b, exponent_b = torch.frexp(b)
    exponent = (exponent_b - exponent_a + levels // 2).long()
    exact = ((fraction_a - fraction_b).abs() < 1e-5) & (exponent >= 0) & (exponent < levels)
    exponent.masked_fill_(~exact, _SHARED).masked_fill_(~seen, _ZERO)
    return exponent.masked_fill_((size > 0) & (size <= tiny), _LOST)


def _join(before: Tensor, seen: Tensor, place: int) -> Tensor:
    joined = before + seen * place
    return torch.where((before < 0) | (seen < 0), torch.minimum(before, seen), joined)


def _layout(gradient: Tensor | None, owners: Tensor | None, samples: int) -> Layout | None:
    if gradient is None or owners is None:
        return Layout(samples, None, torch.empty(0, dtype=torch.long), certain=False)
    worst = int(owners.min()) if owners.numel() else _ZERO
    if worst == _SHARED or bool((owners >= samples).any()):
        return None
    blocks = _fitting_blocks(owners, samples)
    certain = len(blocks) == 1
    if not certain and gradient.numel() and not bool(torch.isfinite(gradient.sum())):
        return None  # nobody can tell whose the NaNs are, so nobody owns them
    # In half precision little is lost all the time; there all that was seen must allow no other answer.
    if worst == _LOST and not (certain and gradient.dtype == torch.float16):
        return None
    if blocks:
        return Layout(samples, blocks[0], None, certain)
    return Layout(samples, None, owners, certain=False)


def _fitting_blocks(owners: Tensor, samples: int) -> list[int]:
    """Return every block size under which the owners seen are right, the largest first."""
    if owners.numel() % samples:
        return []
    whole = owners.numel() // samples
    if samples == 1:
        return [whole]
    seen = (owners >= 0).nonzero().squeeze(1)
    owner = owners[seen]
    few = slice(None, None, max(1, len(seen) // 512))
    fitting = []
    for block in _divisors(whole):
        if bool((seen[few] // block % samples == owner[few]).all()) and bool((seen // block % samples == owner).all()):
            fitting.append(block)
    return fitting


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
