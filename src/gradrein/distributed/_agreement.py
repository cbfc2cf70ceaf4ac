"""Every rank makes the same call: the first message over each process group compares what each was called with.

A fingerprint of the call is sent as integers w below 2**16, each with its square. A rank finds n w and n w² in the
sums over n ranks if and only if all sent the same w (their variance is 0), and integers of this size are added without
rounding for up to 2**20 ranks. Under a maximum, w and -w serve the same purpose. So all ranks of a group find that they
agree, or all find that they do not. The size of a first message depends neither on the ranks nor on what they hold:
messages of different sizes would not tell, under gloo they end the process.

Only where ranks disagree does a second exchange find out who was called with what, for the error. A rank that knows of
a fault goes on, and tells the other groups it is in by a flag, so that all stop before anything is written.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.process_group import assert_async
from ..errors import RankError
from ._fingerprints import fingerprint
from ._groups import Group, collective

MESSAGE = 1024  # float64 values in a first message
_WORDS = 4
_PRIME = 65521  # below 2**16
_HEADER = 2 * _WORDS + 1
CAPACITY = MESSAGE - _HEADER
_UNCHANGED = " No gradient was changed on this rank."


class Agreement:
    """What the ranks of one call must have been called with, all alike.

    Use `all_reduce` for every exchange of the call, in one order of groups on all ranks, and `finish` before anything
    is written.

    Args:
        what: What is exchanged, for errors: `"gradient norms"`.
        asked: What must be the same on every rank, in words or numbers that an error can show; `"the call"` first.
        fingerprints: Numbers that must be the same, by what they stand for.
        on_group: Further numbers that must be the same in one group only.
    """

    def __init__(
        self,
        what: str,
        asked: Mapping[str, Any],
        fingerprints: Mapping[str, int] | None = None,
        on_group: Mapping[Group, Mapping[str, int]] | None = None,
    ) -> None:
        self._what = what
        self._asked = dict(asked)
        self._fingerprints = dict(fingerprints or {})
        self._on_group = on_group or {}
        self._fault = ""
        self._agreed: dict[Group, bool] = {}

    def all_reduce(self, values: Tensor, group: Group, *, largest: bool = False) -> Tensor:
        """Return the sum of float64 values over a group, or the largest. The first message also compares the calls.

        Args:
            values: A vector; where the ranks agree, of the same length on every rank.
            group: The process group.
            largest: Reduce by the maximum.

        Returns:
            The values of all ranks, reduced; zeros where the ranks of the group do not agree.
        """
        if group in self._agreed:
            return self._reduced(values, group, largest) if self._agreed[group] else torch.zeros_like(values)
        compared = {**self._fingerprints, **self._on_group.get(group, {})}
        header = self._header(compared, largest)
        first, rest = values[:CAPACITY].to(group.device, torch.float64), values[CAPACITY:]
        numbers = torch.tensor(header, dtype=torch.float64).to(group.device)
        message = self._reduced(torch.cat([numbers, first, first.new_zeros(CAPACITY - len(first))]), group, largest)
        self._agreed[group] = _are_alike(message[:_HEADER], header, 1 if largest else group.size)
        if not self._agreed[group]:
            found = self._disagreement(compared, group)  # which all ranks of the group call, also one with a fault
            self._fault = self._fault or found
            return torch.zeros_like(values)
        reduced = message[_HEADER : _HEADER + len(first)].to(values.device)
        return torch.cat([reduced, self._reduced(rest, group, largest)]) if len(rest) else reduced

    def require(self, condition: Tensor, fault: str) -> None:
        """Note a fault where a condition does not hold that all ranks see alike."""
        if condition.device.type != "cpu":  # reading would wait for the device
            assert_async(condition, f"gradrein: {fault}")
        elif not condition:
            self._fault = self._fault or fault

    def finish(self) -> None:
        """Raise if there was a fault in any group.

        Raises:
            RankError: (a RuntimeError) There was.
        """
        if self._fault:
            raise RankError(self._fault.removesuffix(_UNCHANGED) + _UNCHANGED)

    def _reduced(self, values: Tensor, group: Group, largest: bool) -> Tensor:
        """Reduce values over a group."""
        if not len(values):
            return values
        sent, op = values.to(group.device, copy=True), dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        collective(lambda: dist.all_reduce(sent, op, group=group.group), group.group, self._what)
        return sent.to(values.device)

    def _header(self, compared: Mapping[str, int], largest: bool) -> list[int]:
        number = fingerprint((*self._asked.values(), *compared.values(), largest))
        words = [number // _PRIME**k % _PRIME for k in range(_WORDS)]
        return [*words, *([-w for w in words] if largest else [w * w for w in words]), int(bool(self._fault))]

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
