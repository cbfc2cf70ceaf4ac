"""Numbers that stand for values, the same in every process."""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .._torch.dtensor import specs_of
from .recent import Recent

_KEPT = 2**64 - 1
_dtypes: dict[torch.dtype, int] = {}
_recent = Recent[Sequence[int]]()


class _PlainMeta(NamedTuple):
    shape: Any  # of a shard, whose shape may differ from rank to rank, the number of dimensions
    dtype: torch.dtype


def fingerprint(value: object) -> int:
    """Return a number for a value by its repr. The hash of a string is not the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def parameter_fingerprints(
    names: Sequence[str] | None, parameters: Sequence[Any], sharded: Sequence[bool] = ()
) -> Sequence[int]:
    """Return a number for each parameter, from its name (where names are known), shape, dtype and placements.

    Args:
        names: The names, or None.
        parameters: The parameters.
        sharded: Which of them are shards in plain tensors.
    """
    specs = specs_of(parameters)
    if any(sharded) or type(None) in set(map(type, specs)):
        cut = sharded or [False] * len(specs)
        metas = [_meta(p, spec, shard) for p, spec, shard in zip(parameters, specs, cut, strict=True)]
        placements = [spec and spec.placements for spec in specs]
    else:
        metas, placements = [spec.tensor_meta for spec in specs], [spec.placements for spec in specs]
    return _recent.of((names, metas, placements), lambda: _fingerprints(names, metas, placements))


def _meta(parameter: Any, spec: Any, shard: bool) -> Any:
    if spec is not None and not shard:
        return spec.tensor_meta
    return _PlainMeta(parameter.dim() if shard else parameter.shape, parameter.dtype)


def _fingerprints(names: Sequence[str] | None, metas: Sequence[Any], placements: Sequence[Any]) -> Sequence[int]:
    last: Any = ...
    layout = 0
    found = []
    for i, (meta, places) in enumerate(zip(metas, placements, strict=True)):
        if places is not last and places != last:  # neighbours mostly share theirs
            last, layout = places, fingerprint(places)
        name = 0 if names is None else zlib.crc32(names[i].encode())
        found.append(hash((name, meta.shape, _dtypes.get(meta.dtype) or _dtype(meta.dtype), layout)))
    return found


def combine_fingerprints(numbers: Iterable[Any]) -> int:
    """Return one number for several, or for tuples of numbers, in their order: these hash alike in every process."""
    return hash(tuple(numbers)) & _KEPT


def _dtype(dtype: torch.dtype) -> int:
    _dtypes[dtype] = zlib.crc32(str(dtype).encode())
    return _dtypes[dtype]
