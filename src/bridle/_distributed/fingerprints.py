"""Numbers that stand for values, the same in every process."""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._torch.dtensor import specs_of

_KEPT = 2**64 - 1
_dtypes: dict[torch.dtype, int] = {}


def fingerprint(value: object) -> int:
    """Return a number for a value by its repr. The hash of a string is not the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


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
