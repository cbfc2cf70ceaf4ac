"""Inner products between the gradients of samples on different ranks."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .._torch.dtensor import stored_shard
from ._ranks import SampleOrder, SampleRanks
from .representations.base import CHUNK_BYTES, SampleGrads
from .representations.numerics import as_rows, double


def gram_rows(
    forms: Mapping[str, SampleGrads],
    leaves: Mapping[str, Tensor],
    used: Sequence[bool],
    ranks: SampleRanks,
    order: SampleOrder,
) -> dict[str, Tensor]:
    """Return the products of this rank's gradients with those of all ranks, (samples, samples of all), by parameter.

    Args:
        forms: this rank's gradients.
        leaves: the parameters.
        used: for each of them, whether any rank's losses depend on it.
        ranks: all ranks.
        order: how many samples each has.
    """
    names = [name for name, is_used in zip(leaves, used, strict=True) if is_used]
    return {name: _rows(forms.get(name), stored_shard(leaves[name]), ranks, order) for name in names}


def _rows(form: SampleGrads | None, like: Tensor, ranks: SampleRanks, order: SampleOrder) -> Tensor:
    out = torch.zeros(order.mine.stop - order.mine.start, sum(order.samples), dtype=torch.float64)
    own = None if form is None else as_rows(double(form.dense()))
    starts = [sum(order.samples[:rank]) for rank in range(len(order.samples))]
    for part in _parts(max(order.samples), like.numel()):
        sent = like.new_zeros(
            part.stop - part.start, like.numel() * (2 if like.is_complex() else 1), dtype=torch.float64
        )
        if own is not None:
            some = own[part]
            sent[: len(some)] = some
        for start, count, rows in zip(starts, order.samples, ranks.everywhere(sent), strict=True):
            kept = rows[: max(0, min(count, part.stop) - part.start)]
            if own is not None:
                out[:, start + part.start : start + part.start + len(kept)] = own @ kept.to(own).T
    return out


def _parts(samples: int, numbers: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES // max(1, 8 * numbers))
    for start in range(0, samples, step):
        yield slice(start, min(start + step, samples))
