"""Every rank makes the same call: a message of fixed size whose header says what each rank is about to do.

Ranks that disagree then find out by what the header says, on all ranks, before anything is written. Messages of
different sizes would not tell: under gloo they end the process.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import specs_of

_KEPT = 2**52 - 1  # what a float64 holds exactly
_dtypes: dict[torch.dtype, int] = {}


def agree(
    header: Sequence[float],
    payload: Tensor,
    size: int,
    gather: Callable[[Tensor], Tensor],
    accept: Callable[[Tensor], bool],
) -> Tensor | None:
    """Exchange a header and a payload with all ranks.

    Args:
        header: What has to be compared; the same number of values on every rank.
        payload: A vector; where the headers are accepted, of the same length on every rank.
        size: The length of the first message. What does not fit goes in a second one.
        gather: Gathers a vector from all ranks: one row per rank.
        accept: Judges the headers of all ranks, a row for each. It sees the same rows on every rank, so all of them go
            on, or none. It may raise.

    Returns:
        The payload of every rank, one row each; None where the headers were not accepted.
    """
    capacity = size - len(header)
    fill = payload.new_zeros(max(0, capacity - len(payload)))
    rows = gather(torch.cat([payload.new_tensor(header), payload[:capacity], fill]))
    if not accept(rows[:, : len(header)]):
        return None
    rows = rows[:, len(header) : len(header) + len(payload)]
    return rows if len(payload) <= capacity else torch.cat([rows, gather(payload[capacity:])], dim=1)


def fingerprint(value: object) -> int:
    """Return a number for a value, the same in every process, by its repr. The hash of a string is not."""
    return zlib.crc32(repr(value).encode())


def parameter_fingerprints(
    names: Sequence[str] | None, parameters: Sequence[Any], sharded: Sequence[bool] = ()
) -> list[int]:
    """Return a number for each parameter, from its name (where names are known), shape, dtype and placements.

    Args:
        names: The names, or None.
        parameters: The parameters.
        sharded: Which of them are shards in plain tensors, whose shapes may differ from rank to rank.
    """
    last: Any = None
    layout = 0
    found = []
    for i, (p, spec) in enumerate(zip(parameters, specs_of(parameters), strict=True)):
        meta = p if spec is None else spec.tensor_meta
        placements = spec and spec.placements
        if placements is not last and placements != last:  # neighbours mostly share theirs
            last, layout = placements, fingerprint(placements)
        shape = p.dim() if sharded and sharded[i] else meta.shape
        name = 0 if names is None else zlib.crc32(names[i].encode())
        found.append(hash((name, shape, _dtypes.get(meta.dtype) or _dtype(meta.dtype), layout)))
    return found


def combine_fingerprints(numbers: Iterable[int]) -> int:
    """Return one number for several, in their order."""
    return hash(tuple(numbers)) & _KEPT


def _dtype(dtype: torch.dtype) -> int:
    _dtypes[dtype] = zlib.crc32(str(dtype).encode())
    return _dtypes[dtype]
