"""Cross-rank norms: one all-reduce per process group.

Every rank sends the p-th power of the norm of its own shard of each gradient, one float64 each. Powers of what float32
can hold neither overflow nor vanish in float64 up to the order 4. For float64 gradients, larger orders and the maximum
norm, the first message finds the largest shard instead, and for a finite order a second one adds up powers relative to
it. Copies count once: their mean, or their largest where some ranks lack the gradient. Which messages are sent depends
on layouts, dtypes and orders, which all ranks compare, and on what they have found together; never on the values of
one rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _measure
from .._distributed.agreement import Agreement
from .._distributed.fingerprints import combine_fingerprints
from .._distributed.meshes import Group

WHAT = "gradient norms"
_LARGEST_ORDER = 4  # powers of what float32 holds stay in the range of float64
_PARAMETERS = "the parameters, or on their order (their names, shapes, types and placements)"
_MEASURED = "how gradients are laid out and measured"


class Kind(NamedTuple):
    """How a value is to be reduced: the order of the norm, and whether it may be out of the range of float32."""

    p: float
    wide: bool


Entries: TypeAlias = Mapping[int, bool]
"""The values that lie on a process group, by index, and whether its ranks hold shards of each (else copies)."""


class NormExchange(Agreement):
    """The messages of one call.

    Args:
        call: What this rank was called with: the same words on every rank.
    """

    def __init__(self, call: str) -> None:
        super().__init__(WHAT, call)

    def reduce_norms(
        self,
        values: Tensor,
        entries: Entries,
        kinds: Sequence[Kind],
        group: Group,
        *,
        parameters: int = 0,
        count: int | None = None,
        missing: Sequence[int] = (),
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Replace values by what they come to over a process group: a p-norm of shards, the largest of copies.

        Args:
            values: One value per gradient, or per set of gradients.
            entries: Which of them lie on the group, and how.
            kinds: How each value is to be reduced.
            group: The process group.
            parameters: A fingerprint of the parameters, the same on all ranks of the group.
            count: How many gradients there are behind the entries, if not one each.
            missing: The entries that this rank has no gradient for.
            beside: What else must be the same on all ranks of the group, in words that an error can show.
        """
        n = group.group.size()
        if not entries or n == 1:
            return
        agree = self._first_message(entries, kinds, group, parameters, count, missing, beside)
        direct, scaled = _shards(entries, kinds)
        if direct == list(range(len(values))):  # as under FSDP2: to index would cost more than the rest
            orders = _orders([kind.p for kind in kinds], values)
            values.copy_(agree(values**orders) ** (1 / orders))
            return
        copied = [at for at, sharded in entries.items() if not sharded]
        averaged = copied if group.device.type == "cpu" and not any(kinds[at].wide for at in copied) else []
        own = values.clone()
        if direct or (averaged and not scaled):
            orders = _orders([kinds[at].p for at in direct], values)
            found = agree(torch.cat([own[direct] ** orders, own[averaged] / n]))
            values[direct] = found[: len(direct)] ** (1 / orders)
            values[averaged] = found[len(direct) :]
            left = scaled if averaged and self.alike else scaled + copied
            self._take_largest(values, own, left, partial(self.again, group=group))
        else:
            self._take_largest(values, own, scaled + copied, agree)
        self._add_powers(values, own, scaled, kinds, group)

    def add_stages(
        self, values: Tensor, entries: Entries, kinds: Sequence[Kind], group: Group, held: Sequence[int]
    ) -> None:
        """Do the same where ranks hold different parameters: of what types, a rank knows only for its own.

        So powers are sent in the hope that no rank holds float64, and again relative to the largest if one does.

        Args:
            values: One value per set of gradients.
            entries: Which of them lie on the group, and how.
            kinds: How each value is to be reduced; `wide` is about this rank.
            group: The process group.
            held: For each entry of copies, a number for the parameters this rank holds of it, 0 for none.
        """
        if not entries or group.group.size() == 1:
            return
        shown = [Kind(kind.p, False) for kind in kinds]
        wide = [at for at in entries if kinds[at].wide]
        reduce = self._first_message(entries, shown, group, 0, None, wide)
        direct, scaled = _shards(entries, shown)
        copied = [at for at, sharded in entries.items() if not sharded]
        own = values.clone()
        if direct:
            orders = _orders([kinds[at].p for at in direct], values)
            values[direct] = reduce(own[direct] ** orders) ** (1 / orders)
            reduce = partial(self.again, group=group)
            scaled += direct if wide or not self.alike else []  # the same on all ranks: if all are wide they are alike
        self._take_largest(values, own, scaled + copied, reduce, held if copied else (), _different_copies(group))
        self._add_powers(values, own, scaled, kinds, group)

    def require_same(self, marks: Sequence[int], group: Group, fault: str) -> None:
        """Note a fault where copies that the ranks of a group hold have different marks; 0 for none on this rank."""
        if marks and group.group.size() > 1:
            nothing = torch.zeros(0, dtype=torch.float64)
            reduce = partial(self.all_reduce, group=group, asked={"the number of copies": len(marks)}, compared={})
            self._take_largest(nothing, nothing, [], reduce, marks, fault)

    def _first_message(
        self,
        entries: Entries,
        kinds: Sequence[Kind],
        group: Group,
        parameters: int,
        count: int | None,
        missing: Sequence[int],
        beside: Mapping[str, str] | None = None,
    ) -> Callable[..., Tensor]:
        asked = {"the number of gradients": len(entries) if count is None else count, **(beside or {})}
        how = combine_fingerprints([*entries.values(), *(kinds[at] for at in entries)])
        compared = {_PARAMETERS: parameters, _MEASURED: how}
        return partial(self.all_reduce, group=group, asked=asked, compared=compared, missing=missing)

    def _take_largest(
        self,
        values: Tensor,
        own: Tensor,
        where: list[int],
        reduce: Callable[..., Tensor],
        held: Sequence[int] = (),
        otherwise: str = "",
    ) -> None:
        """Replace values by the largest of all ranks. A maximum may lose a NaN, so it is sent apart."""
        if not where and not held:
            return
        sent = own[where]
        least = [-float(n) if n else -math.inf for n in held]
        copies = torch.tensor([*held, *least], dtype=own.dtype, device=own.device)
        found = reduce(torch.cat([sent.nan_to_num(0.0, math.inf), sent.isnan().to(own.dtype), copies]), largest=True)
        top, is_nan, most, fewest = torch.split(found, [len(where)] * 2 + [len(held)] * 2)
        values[where] = torch.where(is_nan > 0, math.nan, top)
        if held:
            self.require(((most == 0) | (most == -fewest)).all(), otherwise)

    def _add_powers(
        self, values: Tensor, own: Tensor, scaled: Sequence[int], kinds: Sequence[Kind], group: Group
    ) -> None:
        """Replace the largest shard, where the order is finite, by the norm of all: powers relative to the largest."""
        at = [k for k in scaled if kinds[k].p < math.inf]
        if at:
            orders, by = _orders([kinds[k].p for k in at], values), _measure.safe_divisor(values[at])
            values[at] = self.again((own[at] / by) ** orders, group) ** (1 / orders) * by


def _shards(entries: Entries, kinds: Sequence[Kind]) -> tuple[list[int], list[int]]:
    """Return the shards whose powers can be added as they are, and those for which the largest comes first."""
    fits = {kind: not kind.wide and 1 <= kind.p <= _LARGEST_ORDER for kind in set(kinds)}
    if all(entries.values()) and len(fits) == 1:
        return (list(entries), []) if fits[kinds[0]] else ([], list(entries))
    direct = [at for at, sharded in entries.items() if sharded and fits[kinds[at]]]
    return direct, [at for at, sharded in entries.items() if sharded and not fits[kinds[at]]]


def _different_copies(group: Group) -> str:
    return (
        f"ranks {dist.get_process_group_ranks(group.group)} hold different parameters under one Replicated pattern: "
        "their number, shapes or dtypes differ or, where a policy learns from each, some have no gradient. Those that "
        "hold any have to hold the same ones: use one pattern for each set of copies, and give missing gradients zeros."
    )


def _orders(orders: list[float], values: Tensor) -> Any:
    """Return the orders to raise a vector to: a number where all are the same, which is exact for squares."""
    return orders[0] if len(set(orders)) == 1 else values.new_tensor(orders)
