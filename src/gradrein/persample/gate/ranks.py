"""Where parameters and samples lie: what `fully_shard` has sharded, and which ranks' samples belong together.

Every query of all ranks begins with one message that compares what each is about to do, and adds up what they have to
know. Those that disagree find out, on all ranks, before anything is written. A process alone sends nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._torch import fsdp
from ..._torch.dtensor import any_dtensor, distribute_own, is_dtensor
from ...distributed import Group, Reduction, fingerprint, groups_of
from ...errors import (
    ArgumentError,
    InplaceModifiedError,
    RankError,
    UnsupportedOperationError,
)
from .arguments import unreached


@dataclass(frozen=True, eq=False)
class ParameterViews:
    """Parameters, by name.

    Attributes:
        held: what the optimizer holds and ``.grad`` is written to.
        leaves: what the graph ends in.
        mesh: what `fully_shard` has sharded them over: the ranks that hold the samples; None without it.
        gathered: a context in which the leaves have their values. Every rank has to enter it.
    """

    held: dict[str, Tensor]
    leaves: dict[str, Tensor]
    mesh: Any = None
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext


def parameter_views(named: dict[str, Tensor]) -> ParameterViews:
    """Find where parameters are."""
    states = fsdp.sharded_states(named.values())
    if not states:
        return ParameterViews(named, named)
    views_of = {id(tensor): views for views in fsdp.shards(states) for tensor in views}
    views = {name: views_of.get(id(tensor), (tensor, tensor)) for name, tensor in named.items()}
    held = {name: view[0] for name, view in views.items()}
    leaves = {name: view[1] for name, view in views.items()}
    meshes = fsdp.data_meshes(states)
    # Where only parameters that fully_shard ignores are asked about, the samples still lie on its mesh.
    used = [meshes[id(tensor)] for tensor in held.values() if id(tensor) in meshes] or list(meshes.values())
    return ParameterViews(held, leaves, _common_mesh(used), _opener(states))


def _common_mesh(meshes: list[Any]) -> Any:
    if any(mesh != meshes[0] for mesh in meshes):
        raise UnsupportedOperationError(
            f"per_sample: the parameters are on different meshes, {meshes[0]} among them, so it is unknown which "
            "ranks hold the samples. Pass the parameters of one mesh at a time."
        )
    return meshes[0] if meshes else None


def _opener(states: list[Any]) -> Callable[[], AbstractContextManager[None]]:
    depth, versions = 0, fsdp.versions(states)

    @contextmanager
    def gathered() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            with nullcontext() if depth > 1 else fsdp.gathered(states):
                # torch's own check does not see it: what is gathered counts as unchanged.
                if fsdp.versions(states) != versions:  # only now: the other ranks gather too
                    raise InplaceModifiedError(
                        "per_sample: parameters were changed since the losses were computed, so the recorded graph "
                        "no longer matches them. Query before optimizer.step().",
                        (),
                    )
                yield
        finally:
            depth -= 1

    return gathered


_BUCKET = 1 << 24  # elements in one message of gradients


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

    def add_up(self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up sums over the ranks, many in one message: the same bits on all of them.

        Nothing is handed out before all is there, so that no error and no rank that does not come leaves gradients half
        written.

        Args:
            sums: this rank's, of the parameters that its losses depend on; zeros are added for others that are used.
            parameters: lay sums out like these, in their dtype, and in float32 at least.
        """
        totals: dict[str, Tensor] = {}
        for (name, parameter), is_used in zip(parameters.items(), self.used, strict=True):
            if is_used:
                total = sums.get(name)
                if total is None:
                    total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                if total.dtype != parameter.dtype or total.dtype != torch.float32:
                    total = total.to(torch.promote_types(parameter.dtype, torch.float32))
                totals[name] = total
        if self.reduction is not None:
            if self.total and not totals:
                raise unreached(parameters)
            totals = _in_buckets(totals, self.reduction)
        if not any_dtensor(parameters.values()):
            return totals
        return {name: _laid_out(total, parameters[name]) for name, total in totals.items()}


def agree(
    groups: Sequence[Group],
    ids: Tensor | None,
    call: str,
    parameters: Mapping[str, Tensor],
    used: Sequence[bool],
    counts: Sequence[int],
    same: Mapping[str, float],
) -> Agreed:
    """Compare the call of this rank with those of all others, and exchange what they have to know.

    Args:
        groups: one process group for each dimension of the mesh that the ranks form; none for a process alone.
        ids: the numbers of this rank's groups of samples, if there are any.
        call: the query.
        parameters: what it is about.
        used: for each of them, whether this rank's losses depend on it.
        counts: of samples, and of those without a finite norm.
        same: settings that must be the same on every rank.
    """
    if not groups:
        return Agreed(counts[0], counts[1], used, None)
    what = [(name, tuple(p.shape), p.dtype) for name, p in parameters.items()]
    compared = {"the call": call, "`sample_groups`": ids is not None, **same}
    numbers = {"the parameters": fingerprint(what)}
    reduction = Reduction(groups, "per-sample gradients", compared, dict.fromkeys(groups, numbers))
    try:
        sent = reduction.sum(torch.tensor([*counts, *used], dtype=torch.float64))
    except RankError as error:
        quantile = " To clip at a quantile of all norms, take it of `norms(gathered=True)`."
        raise RankError(f"{call}: {error}{quantile if 'max_norm' in str(error) else ''}") from error
    samples, bad, *users = [int(n) for n in sent.tolist()]
    agreed = Agreed(samples, bad, [n > 0 for n in users], reduction)
    if ids is not None:
        _refuse_torn_groups(call, ids, agreed)
    return agreed


def _in_buckets(sums: Mapping[str, Tensor], reduction: Reduction) -> dict[str, Tensor]:
    """Sum over the ranks, neighbours of one dtype in one message."""
    totals: dict[str, Tensor] = {}
    rest = list(sums.items())
    while rest:
        bucket = [rest.pop(0)]
        while rest and rest[0][1].dtype == bucket[0][1].dtype and sum(one.numel() for _, one in bucket) < _BUCKET:
            bucket.append(rest.pop(0))
        flat = torch.cat([part.reshape(-1) for _, part in bucket])
        total = reduction.sum(torch.view_as_real(flat) if flat.is_complex() else flat)
        whole = torch.view_as_complex(total) if flat.is_complex() else total
        parts = torch.split(whole, [part.numel() for _, part in bucket])
        totals |= {name: one.view(part.shape).clone() for (name, part), one in zip(bucket, parts, strict=True)}
    return totals


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
    own: Tensor = distribute_own(total, parameter.device_mesh, parameter.placements)
    return own


def ranks_with_samples(parameters: object, mesh: Any, group: Any, device: torch.device) -> tuple[Group, ...]:
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
    if group is None:
        return ()
    if not isinstance(group, dist.ProcessGroup) and getattr(group, "get_coordinate", lambda: None)() is None:
        raise ArgumentError(
            "per_sample: `process_group` must be a process group or a device mesh that this rank is part of, found "
            f"{group!r:.80}."
        )
    return tuple(replace(one, device=device) for one in groups_of(group) if one.size > 1)


def _wrapped_group(model: nn.Module) -> Any:
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    groups = {id(wrapper.process_group): wrapper.process_group for wrapper in wrappers}
    if len(groups) > 1:
        raise ArgumentError(
            f"per_sample: the model holds {len(groups)} DistributedDataParallel modules with different process groups. "
            "Pass `process_group` to say which ranks hold the samples."
        )
    return next(iter(groups.values()), None)
