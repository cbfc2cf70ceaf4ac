"""Samples that lie on several ranks: what the ranks agree on, gather and add up.

Every question to all ranks begins with one message of a fixed length, in which each says what it is about to do. Those
that disagree find out by what is said, on all ranks, before anything is written. A process alone is a group of none,
which sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._distributed.agreement import fingerprint
from .._distributed.collectives import all_gather_rows, all_reduce_
from ..errors import ArgumentError, RankError, UnsupportedGradientError

_MESSAGE = 16
# What is exchanged, for errors.
_WHAT = "per-sample gradients"


@dataclass(frozen=True)
class Handshake:
    """What the ranks have exchanged, in their order.

    Attributes:
        samples: how many samples each has.
        bad: how many of them have no finite norm.
        used: for each parameter, whether any rank's losses depend on it.
        mine: where this rank's samples are among all.
    """

    samples: tuple[int, ...]
    bad: tuple[int, ...]
    used: tuple[bool, ...]
    mine: slice

    @property
    def total(self) -> int:
        """How many samples there are on all ranks."""
        return sum(self.samples)


@dataclass(frozen=True, eq=False)
class SampleRanks:
    """The ranks that answer together.

    Attributes:
        groups: one process group for each dimension of the mesh they form; none for a process alone.
        device: where messages are.
        ids: the numbers of this rank's groups of samples, if there are any.
    """

    groups: tuple[Any, ...]
    device: torch.device
    ids: Tensor | None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that draws the noise."""
        return all(group.rank() == 0 for group in self.groups)

    def handshake(
        self,
        call: str,
        parameters: Mapping[str, Tensor],
        used: Sequence[bool],
        counts: Sequence[int],
        same: Mapping[str, float],
    ) -> Handshake:
        """Compare the call of this rank with those of all others, and exchange what they have to know.

        Args:
            call: the question.
            parameters: what is asked about.
            used: for each of them, whether this rank's losses depend on it.
            counts: of samples, of those without a finite norm, and of sparse gradients to be written.
            same: settings that must be the same on every rank.
        """
        if not self.groups:
            return Handshake((counts[0],), (counts[1],), tuple(used), slice(0, counts[0]))
        what = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
        grouped = self.ids is not None
        asked = {"the call": fingerprint(call), "the parameters": fingerprint(what), "`sample_groups`": grouped, **same}
        sent = [*counts, fingerprint(tuple(used)), *asked.values()]
        rows = self._everywhere(torch.tensor(sent + [0.0] * (_MESSAGE - len(sent)), dtype=torch.float64))
        for name, column in zip(asked, rows[:, 4:].T, strict=False):
            if not bool((column == column[0]).all()):
                raise RankError(_disagreement(call, name, column.tolist() if name in same else []))
        if bool(rows[:, 2].any()):
            raise _sparse(call)
        if not bool((rows[:, 3] == rows[0, 3]).all()):
            used = self._everywhere(torch.tensor(used, dtype=torch.uint8)).amax(0).tolist()
        samples, bad = (tuple(int(n) for n in rows[:, i]) for i in (0, 1))
        start = sum(samples[: self._number()])
        agreed = Handshake(samples, bad, tuple(map(bool, used)), slice(start, start + counts[0]))
        self._refuse_torn_groups(call, agreed)
        return agreed

    def gather(self, rows: Tensor, agreed: Handshake) -> Tensor:
        """Return the rows of all samples, given those of this rank's samples."""
        short = max(agreed.samples) - len(rows)
        padded = torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])
        found = self._everywhere(padded)
        return torch.cat([part[:count] for part, count in zip(found, agreed.samples, strict=True)]).to(rows.device)

    def all_reduce(self, values: Tensor) -> None:
        """Replace values by their sum over the ranks."""
        for group in self.groups:
            all_reduce_(values, group, _WHAT)

    def alone(self) -> "SampleRanks":
        """Return this rank by itself."""
        return replace(self, groups=())

    def _everywhere(self, sent: Tensor) -> Tensor:
        """Return what every rank sent, a row for each."""
        rows = sent.to(self.device)[None]
        for group in reversed(self.groups):
            rows = all_gather_rows(rows, group, _WHAT)
        return rows

    def _number(self) -> int:
        number = 0
        for group in self.groups:
            number = number * group.size() + group.rank()
        return int(number)

    def _refuse_torn_groups(self, call: str, agreed: Handshake) -> None:
        if self.ids is None:
            return
        ids = self.ids.double() if self.ids.is_floating_point() else self.ids.long()
        numbers, times = torch.unique(self.gather(ids, agreed), return_counts=True)
        if bool((times > 1).any()):
            raise ArgumentError(
                f"{call}: group {numbers[times > 1][0].item()} of `sample_groups` has samples on several ranks, so "
                "none of them knows its norm. Bring the samples of a group to one rank or, if these are different "
                "groups, number them differently on each. No gradient was changed."
            )


def ranks_of(parameters: object, mesh: Any, group: Any, device: torch.device, ids: Tensor | None) -> SampleRanks:
    """Find the ranks whose samples belong together: those that `process_group` says, or else those of the model."""
    if mesh is not None:
        if group is not None:
            raise ArgumentError(
                "per_sample: `process_group` was given, but the parameters are sharded by fully_shard: the ranks are "
                f"those of its mesh, {mesh}. Leave `process_group` out."
            )
        group = mesh
    elif group is None and isinstance(parameters, nn.Module):
        group = _wrapped_group(parameters)
    return SampleRanks(tuple(one for one in _groups(group) if one.size() > 1), device, ids)


def _groups(group: Any) -> Sequence[Any]:
    if group is None:
        return ()
    if isinstance(group, dist.ProcessGroup):
        return (group,)
    if getattr(group, "get_coordinate", lambda: None)() is None:
        raise ArgumentError(
            "per_sample: `process_group` must be a process group or a device mesh that this rank is part of, found "
            f"{group!r:.80}."
        )
    found: Sequence[Any] = group.get_all_groups()
    return found


def _wrapped_group(model: nn.Module) -> Any:
    found = {id(m.process_group): m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)}
    if len(found) > 1:
        raise ArgumentError(
            f"per_sample: the model holds {len(found)} DistributedDataParallel modules with different process groups. "
            "Say with `process_group` which ranks hold the samples."
        )
    return next(iter(found.values()), None)


def _sparse(call: str) -> UnsupportedGradientError:
    return UnsupportedGradientError(
        f"{call}: an embedding was made with sparse=True, and sparse gradients are not added up over ranks. Make it "
        "with sparse=False. No gradient was changed."
    )


def _disagreement(call: str, name: str, found: list[float]) -> str:
    says = f": {found}, by rank" if found else ""
    hint = " To clip at a quantile of all norms, take it of `norms(gathered=True)`." if name == "max_norm" else ""
    return (
        f"{call}: the ranks disagree on {name}{says}. Every rank has to ask the same, of the same parameters.{hint} "
        "No gradient was changed."
    )
