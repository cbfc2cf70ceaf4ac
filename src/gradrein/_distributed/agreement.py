"""Every rank makes the same call: an all-reduce that compares what each was called with, and reduces what it has.

A fingerprint of the call is sent as integers w below 2**16, each with its square. A rank finds n w and n w² in the
sums over n ranks if and only if all sent the same w (their variance is 0), and integers of this size are added without
rounding for up to 2**20 ranks. So all ranks of a group find that they agree, or all find that they do not. Under a
maximum, w and -w serve the same purpose. The size of the message depends neither on the ranks nor on what they hold:
messages of different sizes would not tell, under gloo they end the process.

Only where ranks disagree does a second exchange find out who was called with what, for the error. A rank that has found
a fault goes on to tell the other groups it is in, so that all stop before anything is written.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.process_group import assert_async
from ..errors import RankError
from .collectives import all_reduce_
from .disagreement import disagreement
from .fingerprints import combine_fingerprints, fingerprint
from .meshes import Group

MESSAGE = 1024  # float64 values in a first message
_UNCHANGED = " No gradient was changed on this rank."
_AT_ONCE = 1.0  # seconds in which a rank finds that another is gone, rather than late
_WORDS = 4
_PRIME = 65521  # below 2**16; the sum of n equal words is 0 modulo a prime only if they are
_HEADER = 4 * _WORDS + 1
CAPACITY = MESSAGE - _HEADER
_OF_CALL = [*range(_WORDS), *range(2 * _WORDS, 3 * _WORDS)]  # where a header has the words of the call
_OF_MISSING = [*range(_WORDS, 2 * _WORDS), *range(3 * _WORDS, 4 * _WORDS)]


class Agreement:
    """The messages of one call.

    Args:
        what: What is exchanged, for errors.
        call: What this rank was called with: the same words on every rank.

    Attributes:
        disagreed: Whether the ranks of a group have found that they do not agree, or that one of them has a fault.
        alike: Whether the ranks of the last group, and those they heard from before, lack the same values. False where
            finding out would wait for a device.
    """

    def __init__(self, what: str, call: str) -> None:
        self._what = what
        self._call = call
        self._fault = ""
        self._missing = [0] * _WORDS
        self._gone = False
        self.disagreed = False
        self.alike = False

    def fail(self, fault: str) -> None:
        """Note a fault. This rank takes part in what is left, to tell the others."""
        self._fault = self._fault or fault

    def tell(
        self,
        groups: Iterable[Group],
        error: Exception | None = None,
        *,
        compared: Mapping[str, int] | None = None,
    ) -> None:
        """Exchange nothing but whether a rank has a fault, such as an error of this one, over each group in turn.

        Args:
            groups: The groups.
            error: The error of this rank.
            compared: Fingerprints that must be the same in each group.
        """
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        for group in groups:
            self.all_reduce(torch.zeros(0, dtype=torch.float64), group, {}, compared or {})

    def finish(self) -> None:
        """Raise if there was a fault in any group."""
        if self._fault:
            raise RankError(self._fault.removesuffix(_UNCHANGED) + _UNCHANGED)

    def all_reduce(
        self,
        values: Tensor,
        group: Group,
        asked: Mapping[str, Any],
        compared: Mapping[str, int],
        *,
        largest: bool = False,
        missing: Sequence[int] = (),
    ) -> Tensor:
        """Return the sum of float64 values over a group, or the largest: one collective, two for many values.

        Args:
            values: A vector; where the ranks agree, of the same length on every rank.
            group: The process group.
            asked: What must be the same on every rank, in words or numbers that an error can show.
            compared: Fingerprints that must be the same.
            largest: Reduce by the maximum.
            missing: What this rank lacks, which others may have: `alike` tells whether all lack the same.

        Returns:
            The values of all ranks, reduced; zeros where the ranks do not agree.
        """
        asked = {"the call": self._call, **asked}
        number = combine_fingerprints([fingerprint(tuple(asked.values())), *compared.values()])
        absent = _words(fingerprint(tuple(missing))) if missing else [0] * _WORDS
        absent = [(a + b) % _PRIME for a, b in zip(absent, self._missing, strict=True)]
        header = _header([*_words(number), *absent], bool(self._fault), largest)
        first, rest = values[:CAPACITY].to(group.device, torch.float64), values[CAPACITY:]
        numbers = torch.tensor(header, dtype=torch.float64).to(group.device)
        sent = torch.cat([numbers, first, first.new_zeros(CAPACITY - len(first))])
        if not self._reduce(sent, group, largest):
            return torch.zeros_like(values)
        if not self._agreed(sent[:_HEADER], header, group, largest):
            self.disagreed = True
            self.fail(disagreement(self._what, self._fault, asked, compared, group))
            return torch.zeros_like(values)
        found = sent[_HEADER : _HEADER + len(first)].to(values.device)
        return torch.cat([found, self.again(rest, group, largest=largest)]) if len(rest) else found

    def again(self, values: Tensor, group: Group, *, largest: bool = False) -> Tensor:
        """Reduce further values over a group whose ranks have agreed."""
        found = values.to(group.device, copy=True)
        if self._fault or not len(values) or not self._reduce(found, group, largest):
            return torch.zeros_like(values)
        return found.to(values.device)

    def require(self, condition: Tensor, fault: str) -> None:
        """Note a fault where a condition does not hold that all ranks of a group see alike."""
        if condition.device.type != "cpu":  # reading would wait for the device
            assert_async(condition, f"gradrein: {fault}")
        elif not condition:
            self.fail(fault)

    def _reduce(self, values: Tensor, group: Group, largest: bool) -> bool:
        """Reduce over a group.

        A rank that finds another gone goes on to tell so in the groups that are left. One that has waited for the
        timeout does not: the others have waited as long.
        """
        if self._gone:
            return False
        start = time.monotonic()
        try:
            all_reduce_(values, group.group, self._what, largest=largest)
        except RankError as error:
            self.fail(str(error))
            self._gone = time.monotonic() - start > _AT_ONCE
            return False
        return True

    def _agreed(self, found: Tensor, header: list[int], group: Group, largest: bool) -> bool:
        n = 1 if largest else group.group.size()
        if found.device.type != "cpu":
            at = [*_OF_CALL, _HEADER - 1]
            same = found[at] == torch.tensor([n * header[i] for i in at], dtype=found.dtype).to(found.device)
            assert_async(same.all(), "gradrein: the ranks of a group did not make the same call")
            return True
        numbers = [int(value) for value in found.tolist()]
        same_at = [value == n * own for value, own in zip(numbers, header, strict=True)]
        self.alike = all(same_at[i] for i in _OF_MISSING)
        self._missing = [value % _PRIME for value in numbers[_WORDS : 2 * _WORDS]]
        return numbers[-1] == 0 and all(same_at[i] for i in _OF_CALL)


def _words(number: int) -> list[int]:
    return [number // _PRIME**k % _PRIME for k in range(_WORDS)]


def _header(words: list[int], fault: bool, largest: bool) -> list[int]:
    return [*words, *([-w for w in words] if largest else [w * w for w in words]), int(fault)]
