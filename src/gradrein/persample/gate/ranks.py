"""Samples that lie on several ranks: which ranks these are, what they agree on, gather and add up.

Every query of all ranks begins with one message that compares what each is about to do, and adds up what they have to
know. Those that disagree find out, on all ranks, before anything is written. A process alone sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._torch.dtensor import any_dtensor, distribute_own, is_dtensor
from ...distributed import Agreement, Group, Reduction, fingerprint
from ...errors import ArgumentError, RankError, UnsupportedGradientError

_BUCKET = 1 << 24  # elements in one message of gradients


@dataclass(frozen=True, eq=False)
class SampleRanks:
    """The ranks whose samples belong together.

    Attributes:
        groups: one process group for each dimension of the mesh they form; none for a process alone.
        ids: the numbers of this rank's groups of samples, if there are any.
    """

    groups: tuple[Group, ...]
    ids: Tensor | None

    def agree(
        self,
        call: str,
        parameters: Mapping[str, Tensor],
        used: Sequence[bool],
        counts: Sequence[int],
        same: Mapping[str, float],
    ) -> "Agreed":
        """Compare the call of this rank with those of all others, and exchange what they have to know.

        Args:
            call: the query.
            parameters: what it is about.
            used: for each of them, whether this rank's losses depend on it.
            counts: of samples, of those without a finite norm, and of sparse gradients to be written.
            same: settings that must be the same on every rank.
        """
        if not self.groups:
            return Agreed(counts[0], counts[1], used, None)
        what = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
        asked = {"the call": call, "`sample_groups`": self.ids is not None, **same}
        agreement = Agreement("per-sample gradients", asked, {"the parameters": fingerprint(what)})
        reduction = Reduction(self.groups, agreement)
        try:
            sent = reduction.sum(torch.tensor([*counts, *used], dtype=torch.float64))
        except RankError as error:
            quantile = " To clip at a quantile of all norms, take it of `norms(gathered=True)`."
            raise RankError(f"{call}: {error}{quantile if 'max_norm' in str(error) else ''}") from error
        samples, bad, sparse, *users = [int(n) for n in sent.tolist()]
        if sparse:
            raise UnsupportedGradientError(
                f"{call}: an embedding was made with sparse=True, and sparse gradients are not added up over ranks. "
                "Make it with sparse=False. No gradient was changed."
            )
        agreed = Agreed(samples, bad, [n > 0 for n in users], reduction)
        if self.ids is not None:
            _refuse_torn_groups(call, self.ids, agreed)
        return agreed


@dataclass(frozen=True, eq=False)
class Agreed:
    """What the ranks have found out together, for one query.

    Attributes:
        total: how many samples there are on all ranks.
        bad: how many of them have no finite norm.
        used: for each parameter, whether any rank's losses depend on it.
        reduction: sums over the ranks; None for a process alone.
    """

    total: int
    bad: int
    used: Sequence[bool]
    reduction: Reduction | None

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of all samples, in the order of ranks, and which are those of this rank, which are given."""
        if self.reduction is None:
            return rows, slice(None)
        number, ranks = 0, 1
        for group in self.reduction.groups:
            number, ranks = number * group.size + group.group.rank(), ranks * group.size
        counts = torch.zeros(ranks, dtype=torch.float64)
        counts[number] = len(rows)
        counts = self.reduction.sum(counts)
        before, total = int(counts[:number].sum()), int(counts.sum())
        own = slice(before, before + len(rows))
        everywhere = rows.new_zeros(total, *rows.shape[1:])
        everywhere[own] = rows
        return self.reduction.sum(everywhere), own

    def add_up(self, sums: list[tuple[str, Tensor]], parameters: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Add up sums over the ranks, many in one message: the same bits on all of them.

        Nothing is handed out before all is there, so that no error and no rank that does not come leaves gradients half
        written.

        Args:
            sums: this rank's, of the same parameters in the same order as on every other. They are let go of.
            parameters: lay sums out like these.
        """
        totals = sums if self.reduction is None else _in_buckets(sums, self.reduction)
        if not any_dtensor(parameters.values()):
            return totals
        return [(name, _laid_out(total, parameters[name])) for name, total in totals]


def _in_buckets(sums: list[tuple[str, Tensor]], reduction: Reduction) -> list[tuple[str, Tensor]]:
    done: list[tuple[str, Tensor]] = []
    waiting: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    while sums:
        name, part = sums.pop(0)
        bucket = waiting.setdefault(part.dtype, [])
        bucket.append((name, part))
        if sum(p.numel() for _, p in bucket) >= _BUCKET:
            done += _sum_bucket(waiting.pop(part.dtype), reduction)
    return done + [pair for bucket in waiting.values() for pair in _sum_bucket(bucket, reduction)]


def _sum_bucket(bucket: list[tuple[str, Tensor]], reduction: Reduction) -> list[tuple[str, Tensor]]:
    flat = torch.cat([part.reshape(-1) for _, part in bucket])
    total = reduction.sum(torch.view_as_real(flat) if flat.is_complex() else flat)
    whole = torch.view_as_complex(total) if flat.is_complex() else total
    parts = torch.split(whole, [part.numel() for _, part in bucket])
    return [(name, one.view(part.shape).clone()) for (name, part), one in zip(bucket, parts, strict=True)]


def _refuse_torn_groups(call: str, ids: Tensor, agreed: Agreed) -> None:
    everywhere, _ = agreed.gather(ids.double() if ids.is_floating_point() else ids.long())
    numbers, times = torch.unique(everywhere, return_counts=True)
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
    groups = [one for one in _groups(group) if one.size() > 1]
    return SampleRanks(tuple(Group(one.group_name, one, device) for one in groups), ids)


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
