"""Sum, maximum or norm of values of which several ranks hold parts, and whether all ranks make the same call.

A vector has an entry for each tensor, and each tensor its layout. An entry is reduced over the groups of that layout;
copies count once, as their mean. Groups are visited in one order on every rank, whatever a rank holds.

The first message over each group also compares what the ranks were called with. A fingerprint of the call is sent as
integers w below 2**16, each with its square. A rank finds n w and n w² in the sums over n ranks if and only if all sent
the same w (their variance is 0), and integers of this size are added without rounding for up to 2**20 ranks. Under a
maximum, w and -w serve the same purpose. So all ranks of a group find that they agree, or all find that they do not.
The size of a first message depends neither on the ranks nor on what they hold: messages of different sizes would not
tell, under gloo they end the process.

Only where ranks disagree does a second exchange find out who was called with what, for the error. A rank that knows of
a fault goes on, and tells the other groups it is in by a flag, so that all stop before anything is written.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._measure import safe_divisor
from .._torch.process_group import assert_async
from ..errors import RankError
from ._fingerprints import fingerprint
from ._groups import Group, collective

_LARGEST_ORDER = 4  # powers of what float32 holds stay in the range of float64
_WORDS = 4
_PRIME = 65521  # below 2**16
_HEADER = 2 * _WORDS + 1
_CAPACITY = 1024 - _HEADER  # float64 values in a first message
_UNCHANGED = " No gradient was changed on this rank."


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

    Every rank calls the same methods in the same order, before anything is written. The first exchange visits all
    groups, also those that no entry lies on. Each method raises a RankError (a RuntimeError) where the ranks were
    called with different things; on all of them.

    Args:
        groups: The process groups, in one order on all ranks (`in_order`).
        what: What is exchanged, for errors: `"gradient norms"`.
        asked: What must be the same on every rank, in words or numbers that an error can show; `"the call"` first.
        fingerprints: For each group numbers that must be the same on its ranks, by what they stand for.
        rescaled: Whether values may be out of the range of float32, so that their powers may be out of that of float64:
            those are then taken relative to the largest, which another message finds.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        what: str,
        asked: Mapping[str, Any],
        fingerprints: Mapping[Group, Mapping[str, int]],
        *,
        rescaled: bool = False,
    ) -> None:
        self.groups = [group for group in dict.fromkeys(groups) if group.size > 1]
        self.rescaled = rescaled
        self._what, self._asked, self._fingerprints = what, asked, fingerprints
        self._fault = ""
        self._agreed: dict[Group, bool] = {}

    def agree(self) -> None:
        """Compare the calls, and exchange nothing else."""
        self.sum(torch.zeros(0, dtype=torch.float64))

    def sum(self, values: Tensor, layouts: Sequence[Layout] | None = None) -> Tensor:
        """Return the sum of each entry over its layout, by default over all groups."""
        return self._reduce(values if layouts is None else values / _copy_counts(values, layouts), layouts)

    def max(self, values: Tensor, layouts: Sequence[Layout] | None = None) -> Tensor:
        """Return the largest of each entry over its layout; NaN where any of them is."""
        # A maximum may lose a NaN, so it is sent apart.
        sent = torch.cat([values.nan_to_num(0.0, math.inf, -math.inf), values.isnan().to(values.dtype)])
        reduced = self._reduce(sent, None if layouts is None else [*layouts, *layouts], largest=True)
        top, is_nan = reduced.chunk(2)
        return torch.where(is_nan > 0, math.nan, top)

    def norms(self, norms: Tensor, orders: Sequence[float], layouts: Sequence[Layout]) -> Tensor:
        """Return the p-norms of whole tensors, given those of the parts here and the order of each."""
        if not self.groups:
            return norms
        if not self.rescaled and all(1 <= p <= _LARGEST_ORDER for p in set(orders)):
            p = _exponents(orders, norms)
            return self.sum(norms**p, layouts) ** (1 / p)
        top = self.max(norms, layouts)
        at = [i for i, p in enumerate(orders) if p < math.inf]
        if at:
            by, p = safe_divisor(top[at]), _exponents([orders[i] for i in at], norms)
            top[at] = self.sum((norms[at] / by) ** p, [layouts[i] for i in at]) ** (1 / p) * by
        return top

    def _reduce(self, sent: Tensor, layouts: Sequence[Layout] | None, *, largest: bool = False) -> Tensor:
        """Reduce each entry over the groups of its layout."""
        for group in self.groups:
            on = {} if layouts is None else {id(layout): group in layout.groups for layout in layouts}
            at = [] if layouts is None else [i for i, layout in enumerate(layouts) if on[id(layout)]]
            if layouts is None or len(at) == len(sent):  # as under FSDP2: to index would cost more than the rest
                sent = self._all_reduce(sent, group, largest)
            elif at or group not in self._agreed:
                where = torch.tensor(at, dtype=torch.long, device=sent.device)
                sent = sent.index_copy(0, where, self._all_reduce(sent[at], group, largest))
        if self._fault:
            raise RankError(self._fault.removesuffix(_UNCHANGED) + _UNCHANGED)
        return sent

    def _all_reduce(self, values: Tensor, group: Group, largest: bool) -> Tensor:
        """Return a vector reduced over a group; zeros where its ranks do not agree."""
        if group in self._agreed:
            return self._send(values, group, largest) if self._agreed[group] else torch.zeros_like(values)
        compared = self._fingerprints[group]
        number = fingerprint((*self._asked.values(), *compared.values(), largest))
        words = [number // _PRIME**k % _PRIME for k in range(_WORDS)]
        header = [*words, *([-w for w in words] if largest else [w * w for w in words]), int(bool(self._fault))]
        first, rest = values[:_CAPACITY].to(group.device, torch.float64), values[_CAPACITY:]
        numbers = torch.tensor(header, dtype=torch.float64).to(group.device)
        message = self._send(torch.cat([numbers, first, first.new_zeros(_CAPACITY - len(first))]), group, largest)
        self._agreed[group] = _are_alike(message[:_HEADER], header, 1 if largest else group.size)
        if not self._agreed[group]:
            fault = self._disagreement(compared, group)  # which all ranks of the group call, also one with a fault
            self._fault = self._fault or fault
            return torch.zeros_like(values)
        reduced = message[_HEADER : _HEADER + len(first)].to(values.device)
        return torch.cat([reduced, self._send(rest, group, largest)]) if len(rest) else reduced

    def _send(self, values: Tensor, group: Group, largest: bool) -> Tensor:
        if not len(values):
            return values
        sent, op = values.to(group.device, copy=True), dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        collective(lambda: dist.all_reduce(sent, op, group=group.group), group.group, self._what)
        return sent.to(values.device)

    def _disagreement(self, compared: Mapping[str, int], group: Group) -> str:
        """Return who of a group differs in what. All of its ranks call this."""
        ranks, rows = group.ranks, list[Any]([None] * group.size)
        mine = self._fault, {name: str(value)[:600] for name, value in self._asked.items()}, dict(compared)
        try:
            collective(lambda: dist.all_gather_object(rows, mine, group.group), group.group, self._what)
        except RankError as error:
            return str(error)
        for rank, (fault, _, _) in zip(ranks, rows, strict=True):
            if fault:
                return f"rank {rank}, which shares {self._what} with ranks {ranks}, has stopped: {fault}"
        begin = f"ranks {ranks} do not agree on"
        for name in self._asked:
            values = [asked.get(name, "") for _, asked, _ in rows]
            if len(set(values)) > 1:
                return f"{begin} {name}: {_who(ranks, values)}. Every rank has to make the same call."
        for name in compared:
            numbers = [row.get(name) for _, _, row in rows]
            if len(set(numbers)) > 1:
                usual = max(numbers, key=numbers.count)
                odd = [rank for rank, number in zip(ranks, numbers, strict=True) if number != usual]
                return (
                    f"{begin} {name}: {_some(odd)} differ from the others. Every rank has to make the same call, with "
                    "the same parameters in the same order."
                )
        return f"{begin} what they were called with."  # in what is too long to be shown


def _are_alike(sums: Tensor, header: list[int], n: int) -> bool:
    expected = torch.tensor([*(n * word for word in header[:-1]), 0], dtype=sums.dtype).to(sums.device)
    if sums.device.type != "cpu":  # reading would wait for the device
        assert_async((sums == expected).all(), "gradrein: the ranks of a group did not make the same call")
        return True
    return torch.equal(sums, expected)


def _who(ranks: Sequence[int], values: Sequence[str]) -> str:
    """Describe which ranks have which value."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_some(those)}" for value, those in by_value.items())


def _some(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 20} more" if len(ranks) > 20 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:20]))}{more}"


def _copy_counts(values: Tensor, layouts: Sequence[Layout]) -> Tensor | int:
    counts = {id(layout): layout.copy_count for layout in layouts}
    if len(set(counts.values())) == 1:
        return next(iter(counts.values()))
    return values.new_tensor([counts[id(layout)] for layout in layouts])


def _exponents(orders: Sequence[float], values: Tensor) -> float | Tensor:
    """Return the orders to raise a vector to: a number where all are the same, which is exact for squares."""
    return orders[0] if len(set(orders)) == 1 else values.new_tensor(orders)
