"""Sum, maximum or norm of values of which several ranks hold parts: one message per process group.

A vector has an entry for each tensor, and each tensor its layout. An entry is reduced over the groups of that layout;
copies count once, as their mean. Groups are visited in one order on every rank, whatever a rank holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._measure import safe_divisor
from ._agreement import Agreement
from ._groups import Group

_LARGEST_ORDER = 4  # powers of what float32 holds stay in the range of float64


@dataclass(frozen=True)
class Layout:
    """Over which process groups a tensor lies.

    Attributes:
        shards: Those whose ranks hold different parts of it.
        dims: For each of them the dimension of the tensor that is split.
        copies: Those whose ranks hold the same.
    """

    shards: tuple[Group, ...] = ()
    dims: tuple[int, ...] = ()
    copies: tuple[Group, ...] = ()

    @cached_property
    def groups(self) -> frozenset[Group]:
        """All of them."""
        return frozenset({*self.shards, *self.copies})

    @cached_property
    def copy_count(self) -> int:
        """How many ranks hold the same part."""
        return math.prod(group.size for group in self.copies)

    def along(self, dims: set[int]) -> "Layout":
        """Return the layout of slices along some dimensions: over the groups that split these."""
        cut = [(group, dim) for group, dim in zip(self.shards, self.dims, strict=True) if dim in dims]
        return Layout(tuple(group for group, _ in cut), tuple(dim for _, dim in cut))


class Reduction:
    """What entries of tensors come to over all ranks. In one process, without groups, each method is the identity.

    Every rank calls the same methods in the same order. The first exchange over each group also compares the calls: it
    visits all groups, also those that no entry lies on.

    Args:
        groups: The process groups, in one order on all ranks (`in_order`).
        agreement: What the ranks must have been called with.
        rescaled: Whether values may be out of the range of float32, so that their powers may be out of that of float64:
            those are then taken relative to the largest, which another message finds.
    """

    def __init__(self, groups: Sequence[Group], agreement: Agreement, *, rescaled: bool = False) -> None:
        self.groups = [group for group in dict.fromkeys(groups) if group.size > 1]
        self.agreement = agreement
        self._rescaled = rescaled
        self._met = False

    def agree(self) -> None:
        """Compare the calls, and exchange nothing else.

        Raises:
            RankError: (a RuntimeError) The ranks were called with different things; on all of them.
        """
        self.sum(torch.zeros(0, dtype=torch.float64))

    def sum(self, values: Tensor, layouts: Sequence[Layout] | None = None) -> Tensor:
        """Return the sum of each entry over its layout, by default over all groups.

        Raises:
            RankError: (a RuntimeError) The ranks were called with different things; on all of them.
        """
        return self._reduce(values if layouts is None else values / _copy_counts(values, layouts), layouts)

    def max(self, values: Tensor, layouts: Sequence[Layout] | None = None) -> Tensor:
        """Return the largest of each entry over its layout; NaN where any of them is.

        Raises:
            RankError: (a RuntimeError) The ranks were called with different things; on all of them.
        """
        # A maximum may lose a NaN, so it is sent apart.
        sent = torch.cat([values.nan_to_num(0.0, math.inf, -math.inf), values.isnan().to(values.dtype)])
        reduced = self._reduce(sent, None if layouts is None else [*layouts, *layouts], largest=True)
        top, is_nan = reduced.chunk(2)
        return torch.where(is_nan > 0, math.nan, top)

    def norms(self, norms: Tensor, orders: Sequence[float], layouts: Sequence[Layout]) -> Tensor:
        """Return the p-norms of whole tensors, given those of the parts here and the order of each.

        Raises:
            RankError: (a RuntimeError) The ranks were called with different things; on all of them.
        """
        if not self.groups:
            return norms
        if not self._rescaled and all(1 <= p <= _LARGEST_ORDER for p in set(orders)):
            p = _exponents(orders, norms)
            return self.sum(norms**p, layouts) ** (1 / p)
        top = self.max(norms, layouts)
        at = [i for i, p in enumerate(orders) if p < math.inf]
        if at:
            by, p = safe_divisor(top[at]), _exponents([orders[i] for i in at], norms)
            top[at] = self.sum((norms[at] / by) ** p, [layouts[i] for i in at]) ** (1 / p) * by
        return top

    def require_same(self, marks: Tensor, layouts: Sequence[Layout], fault: str) -> None:
        """Raise on all ranks where copies have different marks: positive numbers, 0 for a rank that holds none.

        Raises:
            RankError: (a RuntimeError) With the text of `fault`.
        """
        least = torch.where(marks > 0, -marks, -math.inf)
        most, least = self.max(torch.cat([marks, least]), [*layouts, *layouts]).chunk(2)
        differ = ((most > 0) & (most != -least)).any().to(marks.dtype).reshape(1)
        self.agreement.require((self.max(differ) == 0).all(), fault)
        self.agreement.finish()

    def _reduce(self, sent: Tensor, layouts: Sequence[Layout] | None, *, largest: bool = False) -> Tensor:
        """Reduce each entry over the groups of its layout."""
        for group in self.groups:
            on = {} if layouts is None else {id(layout): group in layout.groups for layout in layouts}
            at = [] if layouts is None else [i for i, layout in enumerate(layouts) if on[id(layout)]]
            if layouts is None or len(at) == len(sent):  # as under FSDP2: to index would cost more than the rest
                sent = self.agreement.all_reduce(sent, group, largest=largest)
            elif at or not self._met:
                sent = sent.index_copy(0, _index(at, sent), self.agreement.all_reduce(sent[at], group, largest=largest))
        self._met = True
        self.agreement.finish()
        return sent


def _copy_counts(values: Tensor, layouts: Sequence[Layout]) -> Tensor | int:
    counts = {id(layout): layout.copy_count for layout in layouts}
    if len(set(counts.values())) == 1:
        return next(iter(counts.values()))
    return values.new_tensor([counts[id(layout)] for layout in layouts])


def _exponents(orders: Sequence[float], values: Tensor) -> float | Tensor:
    """Return the orders to raise a vector to: a number where all are the same, which is exact for squares."""
    return orders[0] if len(set(orders)) == 1 else values.new_tensor(orders)


def _index(at: list[int], values: Tensor) -> Tensor:
    return torch.tensor(at, dtype=torch.long, device=values.device)
