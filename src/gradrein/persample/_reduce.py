"""Sums over samples, here and on other ranks, and their way into ``.grad``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import stored_shard
from ..errors import ArgumentError
from ._ranks import Handshake, SampleRanks
from ._scatter import Layout, Scattered, scatter_sums
from ._tensor_ranks import TensorRanks
from .representations.base import SampleGrads
from .representations.numerics import are_few, double
from .tracing import all_hold

_BUCKET = 1 << 24  # elements in one message of gradients


def local_sums(
    leaves: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    wanted: Sequence[bool],
    used: Collection[str],
    weigh: Callable[[str], Tensor],
    deviation: float = 0.0,
    generator: torch.Generator | None = None,
    among: TensorRanks | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's sum for each parameter that is wanted: zeros where its losses do not depend on it.

    Args:
        leaves: the parameters as the graph knows them: this is where sums are.
        held: the same as the optimizer holds them: sums are in their dtype, and in float32 at least.
        wanted: for each, whether there is to be a sum.
        used: those that this rank's losses depend on.
        weigh: makes the sum of one of these.
        deviation: of the noise to add.
        generator: where the noise comes from.
        among: the ranks that hold shards of one model; the first of them draws the noise.
    """
    among = TensorRanks() if among is None else among
    for (name, parameter), want in zip(held.items(), wanted, strict=True):
        if not want:
            continue
        if name in used:
            total = weigh(name)
        else:
            shard = stored_shard(leaves[name])
            total = torch.zeros(shard.shape, dtype=parameter.dtype, device=shard.device)
        if deviation:
            noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=total.device)
            each = torch.view_as_real(noise) if noise.is_complex() else noise  # as much for each real number
            each.normal_(0, deviation, generator=generator)
            total = among.shard_of_first(noise, leaves[name]) + total
        if total.dtype != parameter.dtype or total.dtype != torch.float32:
            total = total.to(torch.promote_types(parameter.dtype, torch.float32))
        yield name, total


def add_up(
    sums: Iterable[tuple[str, Tensor]], ranks: SampleRanks, held: Mapping[str, Layout] | None = None
) -> list[tuple[str, Tensor]]:
    """Add up sums over the ranks, many in one message: the same bits on all of them.

    Nothing is handed out before all is there, so that no error and no rank that does not come leaves gradients half
    written.

    Args:
        sums: this rank's, of the same parameters in the same order as on every other.
        ranks: whose sums to add.
        held: lay sums out like this. Without it every rank gets the sums of all samples as they are.
    """
    if not ranks.groups and held is None:
        return list(sums)
    done: list[tuple[str, Tensor]] = []
    waiting: dict[tuple[torch.dtype, Any], list[tuple[str, Tensor]]] = {}
    for name, part in sums:
        if not ranks.groups:
            done.append((name, part if held is None else held[name].lay_out(part)))
            continue
        scattered = None if held is None else held[name].scattered
        key = (part.dtype, scattered)
        bucket = waiting.setdefault(key, [])
        bucket.append((name, part))
        if sum(p.numel() for _, p in bucket) >= _BUCKET:
            done += _reduced(waiting.pop(key), ranks, held, scattered)
    return done + [pair for key, bucket in waiting.items() for pair in _reduced(bucket, ranks, held, key[1])]


def _reduced(
    bucket: list[tuple[str, Tensor]],
    ranks: SampleRanks,
    held: Mapping[str, Layout] | None,
    scattered: Scattered | None,
) -> list[tuple[str, Tensor]]:
    if held is not None and scattered is not None:
        return scatter_sums(bucket, held, scattered)
    flat = torch.cat([part.reshape(-1) for _, part in bucket])
    ranks.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
    parts = torch.split(flat, [part.numel() for _, part in bucket])
    found = [(name, total.view(part.shape).clone()) for (name, part), total in zip(bucket, parts, strict=True)]
    return found if held is None else [(name, held[name].lay_out(total)) for name, total in found]


def factors(norms: Tensor, limit: float, gamma: float | None) -> Tensor:
    """Return what each sample's gradient is multiplied by to clip it."""
    if gamma is not None:
        normalised = (limit / (norms + gamma)).where(norms > 0, 0)
        if not all_hold(~torch.isinf(normalised)):
            raise ArgumentError(
                f"clip_: a norm of {float(norms[torch.isinf(normalised)][0]):.0e} is too small to be scaled to "
                f"{limit}. Pass a larger gamma."
            )
        return normalised
    if are_few(norms):  # with the bits of what is below, where torch multiplies by the reciprocal
        found = [min(1.0, limit * (1 / norm)) if norm > 0 else 1.0 for norm in norms.tolist()]
        return torch.tensor(found, dtype=norms.dtype)
    return (limit / norms).clamp(max=1).where(norms > 0, 1)


def weigher(
    forms: Mapping[str, SampleGrads], weights: Mapping[str, Tensor], good: Tensor | None = None
) -> Callable[[str], Tensor]:
    """Return what makes the weighted sum of a parameter.

    Args:
        forms: the gradients.
        weights: the weight of each sample, for each parameter.
        good: which samples are summed; all by default.
    """

    def weigh(name: str) -> Tensor:
        form = forms[name]
        return form.weighted(weights[name]) if good is None else _finite_weighted(form, weights[name], good)

    return weigh


def _finite_weighted(form: SampleGrads, weights: Tensor, good: Tensor) -> Tensor:
    """Weigh and sum some samples; one that is left out must not come back as zero times NaN."""
    total = torch.zeros(form.shape, dtype=torch.float64, device=good.device)
    for i in good.nonzero().squeeze(1).tolist():
        total = total + double(form.dense(slice(i, i + 1))[0]) * weights[i]
    return total


def nonfinite_message(good: Tensor, agreed: Handshake, among: SampleRanks) -> str:
    """Say which samples have no finite norm. Every rank has to ask."""
    counts = among.order(int((~good).sum())).samples
    ranks = [rank for rank, bad in enumerate(counts) if bad]
    here = f", the first being sample {(~good).nonzero()[0].item()}" if not bool(good.all()) else ""
    where = f" (on ranks {ranks} of the group)" if len(counts) > 1 else ""
    return (
        f"clip_: the gradients of {agreed.bad} of {agreed.total} samples{where} are NaN or infinite{here}. "
        "Pass nonfinite='drop' to leave them out."
    )
