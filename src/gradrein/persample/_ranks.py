"""Samples that lie on several ranks: what the ranks agree on, gather and add up.

Every question to all ranks begins with one all-reduce of a fixed size, which compares what each is about to do and adds
up what they have to know. Those that disagree find out, on all ranks, before anything is written. A process alone is a
group of none, which sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._distributed.agreement import Agreement
from .._distributed.collectives import all_gather_rows, all_reduce_
from .._distributed.fingerprints import fingerprint
from .._distributed.meshes import Group
from ..errors import ArgumentError, RankError, UnsupportedGradientError

# What is exchanged, for errors.
_WHAT = "per-sample gradients"


@dataclass(frozen=True)
class Handshake:
    """What the ranks have found out together.

    Attributes:
        total: how many samples there are on all ranks.
        bad: how many of them have no finite norm.
        used: for each parameter, whether any rank's losses depend on it.
    """

    total: int
    bad: int
    used: tuple[bool, ...]


@dataclass(frozen=True)
class SampleOrder:
    """Where samples are among those of all ranks.

    Attributes:
        samples: how many each rank has, in the order of ranks.
        mine: where those of this rank are.
    """

    samples: tuple[int, ...]
    mine: slice


@dataclass(frozen=True, eq=False)
class SampleRanks:
    """The ranks that answer together.

    Attributes:
        groups: one process group for each dimension of the mesh they form; none for a process alone.
        device: where messages are.
        ids: the numbers of this rank's groups of samples, if there are any.
        copies: groups of ranks that have the same samples, and shards of one model.
    """

    groups: tuple[Any, ...]
    device: torch.device
    ids: Tensor | None
    copies: tuple[Any, ...] = ()

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
        alike: object = None,
    ) -> Handshake:
        """Compare the call of this rank with those of all others, and exchange what they have to know.

        Args:
            call: the question.
            parameters: what is asked about.
            used: for each of them, whether this rank's losses depend on it.
            counts: of samples, of those without a finite norm, and of sparse gradients to be written.
            same: settings that must be the same on every rank.
            alike: what must be the same on ranks that have the same samples.
        """
        if not self.groups and not self.copies:
            return Handshake(counts[0], counts[1], tuple(used))
        sent = torch.tensor([*counts, *used], dtype=torch.float64)
        what = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
        asked = {"`sample_groups`": self.ids is not None, **same}
        agreement = Agreement(_WHAT, call)
        for there in self.messages():
            sent = agreement.all_reduce(sent, there, asked, {"the parameters": fingerprint(what)})
        for there in self.messages(self.copies):
            compared = {
                "the parameters": fingerprint(what),
                "what is about the samples": fingerprint((sent.tolist(), alike)),
            }
            sent = agreement.all_reduce(sent, there, asked, compared) / there.group.size()
        try:
            agreement.finish()
        except RankError as error:
            hint = " To clip at a quantile of all norms, take it of `norms(gathered=True)`." * (
                "max_norm" in str(error)
            )
            raise RankError(f"{call}: {error}{hint}") from error
        samples, bad, sparse, *users = [int(n) for n in sent.tolist()]
        if sparse:
            raise _sparse(call)
        agreed = Handshake(samples, bad, tuple(n > 0 for n in users))
        self._refuse_torn_groups(call)
        return agreed

    def tell(self, call: str, error: Exception) -> None:
        """Tell those who are about to compare their calls that this rank has raised an error."""
        Agreement(_WHAT, call).tell([*self.messages(), *self.messages(self.copies)], error)

    def messages(self, groups: tuple[Any, ...] | None = None) -> list[Group]:
        """Return process groups, by default those along which samples differ, with the device of their messages."""
        found = self.groups if groups is None else groups
        return [Group(group.group_name, group, self.device) for group in found]

    def order(self, samples: int) -> SampleOrder:
        """Exchange how many samples each rank has."""
        counts = [int(n) for n in self.everywhere(torch.tensor([samples])).flatten()]
        start = sum(counts[: self._number()])
        return SampleOrder(tuple(counts), slice(start, start + samples))

    def gather(self, rows: Tensor, order: SampleOrder) -> Tensor:
        """Return the rows of all samples, given those of this rank's samples."""
        short = max(order.samples) - len(rows)
        padded = torch.cat([rows, rows.new_zeros(short, *rows.shape[1:])])
        found = self.everywhere(padded)
        return torch.cat([part[:count] for part, count in zip(found, order.samples, strict=True)]).to(rows.device)

    def all_reduce(self, values: Tensor) -> None:
        """Replace values by their sum over the ranks."""
        for group in self.groups:
            all_reduce_(values, group, _WHAT)

    def alone(self) -> "SampleRanks":
        """Return this rank by itself."""
        return replace(self, groups=())

    def everywhere(self, sent: Tensor) -> Tensor:
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

    def _refuse_torn_groups(self, call: str) -> None:
        if self.ids is None or not self.groups:
            return
        ids = self.ids.double() if self.ids.is_floating_point() else self.ids.long()
        numbers, times = torch.unique(self.gather(ids, self.order(len(ids))), return_counts=True)
        if bool((times > 1).any()):
            raise ArgumentError(
                f"{call}: group {numbers[times > 1][0].item()} of `sample_groups` has samples on several ranks, so "
                "none of them knows its norm. Put the samples of a group on one rank or, if these are different "
                "groups, use different numbers on each rank. No gradient was changed."
            )


def ranks_of(
    parameters: object, mesh: Any, group: Any, device: torch.device, ids: Tensor | None, copies: tuple[Any, ...] = ()
) -> SampleRanks:
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
    groups = tuple(one for one in _groups(group) if one.size() > 1)
    _refuse_copies(groups, copies)
    return SampleRanks(groups, device, ids, copies)


def _refuse_copies(groups: Sequence[Any], copies: Sequence[Any]) -> None:
    """Refuse to add up what ranks of the tensor-parallel mesh hold: other shards of the same samples."""
    spread = [set(dist.get_process_group_ranks(group)) for group in copies]
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if any(len(others.intersection(ranks)) > 1 for others in spread):
            raise ArgumentError(
                f"per_sample: `process_group` has ranks {ranks}, some of which hold shards of the same model and have "
                "the same samples. Pass the process group of the other dimension of the mesh, along which samples "
                "differ, or none."
            )


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
    modules = list(model.modules())
    if not any(isinstance(m, DistributedDataParallel) for m in {type(m): m for m in modules}.values()):
        return None
    found = {id(m.process_group): m.process_group for m in modules if isinstance(m, DistributedDataParallel)}
    if len(found) > 1:
        raise ArgumentError(
            f"per_sample: the model holds {len(found)} DistributedDataParallel modules with different process groups. "
            "Pass `process_group` to say which ranks hold the samples."
        )
    return next(iter(found.values()), None)


def _sparse(call: str) -> UnsupportedGradientError:
    return UnsupportedGradientError(
        f"{call}: an embedding was made with sparse=True, and sparse gradients are not added up over ranks. Make it "
        "with sparse=False. No gradient was changed."
    )
