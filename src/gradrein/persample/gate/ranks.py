"""Samples that lie on several ranks: which ranks these are, what they agree on, gather and add up.

Every query of all ranks begins with one message that compares what each is about to do, and adds up what they have to
know. Those that disagree find out, on all ranks, before anything is written. A process alone sends nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._distributed.agreement import Agreement
from ..._distributed.collectives import all_reduce_
from ..._distributed.fingerprints import fingerprint
from ..._distributed.meshes import Group
from ..._torch.dtensor import any_dtensor, distribute_own, is_dtensor
from ...errors import ArgumentError, RankError, UnsupportedGradientError

# What is exchanged, for errors.
_WHAT = "per-sample gradients"
_BUCKET = 1 << 24  # elements in one message of gradients


class Agreed(NamedTuple):
    """What the ranks have found out together.

    Attributes:
        total: how many samples there are on all ranks.
        bad: how many of them have no finite norm.
        used: for each parameter, whether any rank's losses depend on it.
    """

    total: int
    bad: int
    used: Sequence[bool]


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

    def agree(
        self,
        call: str,
        parameters: Mapping[str, Tensor],
        used: Sequence[bool],
        counts: Sequence[int],
        same: Mapping[str, float],
    ) -> Agreed:
        """Compare the call of this rank with those of all others, and exchange what they have to know.

        Args:
            call: the query.
            parameters: what it is about.
            used: for each of them, whether this rank's losses depend on it.
            counts: of samples, of those without a finite norm, and of sparse gradients to be written.
            same: settings that must be the same on every rank.
        """
        if not self.groups:
            return Agreed(counts[0], counts[1], used)
        sent = torch.tensor([*counts, *used], dtype=torch.float64)
        what = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
        asked = {"`sample_groups`": self.ids is not None, **same}
        agreement = Agreement(_WHAT, call)
        for group in self.groups:
            there = Group(group.group_name, group, self.device)
            sent = agreement.all_reduce(sent, there, asked, {"the parameters": fingerprint(what)})
        try:
            agreement.finish()
        except RankError as error:
            quantile = " To clip at a quantile of all norms, take it of `norms(gathered=True)`."
            raise RankError(f"{call}: {error}{quantile if 'max_norm' in str(error) else ''}") from error
        samples, bad, sparse, *users = [int(n) for n in sent.tolist()]
        if sparse:
            raise _sparse(call)
        self._refuse_torn_groups(call)
        return Agreed(samples, bad, [n > 0 for n in users])

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of all samples, in the order of ranks, and which are those of this rank, which are given."""
        if not self.groups:
            return rows, slice(None)
        before, total = self._places(len(rows))
        found, own = rows.new_zeros(total, *rows.shape[1:], device=self.device), slice(before, before + len(rows))
        found[own] = rows
        return self._sum(found).to(rows.device), own

    def add_up(self, sums: Iterable[tuple[str, Tensor]], parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Add up sums over the ranks, many in one message: the same bits on all of them.

        Nothing is handed out before all is there, so that no error and no rank that does not come leaves gradients half
        written.

        Args:
            sums: this rank's, of the same parameters in the same order as on every other.
            parameters: lay sums out like these.
        """
        totals = self._add_up(sums) if self.groups else list(sums)
        if not any_dtensor(parameters.values()):
            return totals
        return [(name, _laid_out(total, parameters[name])) for name, total in totals]

    def _add_up(self, sums: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        done: list[tuple[str, Tensor]] = []
        waiting: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, part in sums:
            bucket = waiting.setdefault(part.dtype, [])
            bucket.append((name, part))
            if sum(p.numel() for _, p in bucket) >= _BUCKET:
                done += self._sum_bucket(waiting.pop(part.dtype))
        return done + [pair for bucket in waiting.values() for pair in self._sum_bucket(bucket)]

    def _sum_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        flat = torch.cat([part.reshape(-1) for _, part in bucket])
        self._sum(torch.view_as_real(flat) if flat.is_complex() else flat)
        parts = torch.split(flat, [part.numel() for _, part in bucket])
        return [(name, total.view(part.shape).clone()) for (name, part), total in zip(bucket, parts, strict=True)]

    def _places(self, samples: int) -> tuple[int, int]:
        """Return how many samples lie on earlier ranks, and on all."""
        number, ranks = 0, 1
        for group in self.groups:
            number, ranks = number * group.size() + group.rank(), ranks * group.size()
        counts = torch.zeros(ranks, dtype=torch.float64, device=self.device)
        counts[number] = samples
        found = [int(n) for n in self._sum(counts).tolist()]
        return sum(found[:number]), sum(found)

    def _sum(self, values: Tensor) -> Tensor:
        """Replace values by their sum over the ranks."""
        for group in self.groups:
            all_reduce_(values, group, _WHAT)
        return values

    def _refuse_torn_groups(self, call: str) -> None:
        if self.ids is None:
            return
        ids = self.ids.double() if self.ids.is_floating_point() else self.ids.long()
        numbers, times = torch.unique(self.gather(ids)[0], return_counts=True)
        if bool((times > 1).any()):
            raise ArgumentError(
                f"{call}: group {numbers[times > 1][0].item()} of `sample_groups` has samples on several ranks, so "
                "none of them knows its norm. Put the samples of a group on one rank or, if these are different "
                "groups, use different numbers on each rank. No gradient was changed."
            )


def _laid_out(total: Tensor, parameter: Any) -> Tensor:
    """Return a sum that all ranks have as the parameter lies: each keeps its shard."""
    if not is_dtensor(parameter):
        return total
    found: Tensor = distribute_own(total, parameter.device_mesh, parameter.placements)
    return found


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
