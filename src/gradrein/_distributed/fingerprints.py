"""Numbers that stand for values, the same in every process."""

import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor, specs_of
from .checksums import checksum
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


def state_fingerprint(state: Any) -> int:
    """Return a number for a saved state: mappings of numbers, words and tensors.

    Tensors are rounded to float32, since sums may differ between ranks in the last bit of float64. Of a DTensor each
    rank holds its own part, so it is left out.
    """
    if isinstance(state, Mapping):
        return fingerprint([(key, state_fingerprint(value)) for key, value in state.items()])
    if not isinstance(state, Tensor):
        return fingerprint(state)
    if is_dtensor(state):
        return 0
    rounded = state.float() if state.is_floating_point() else state
    return fingerprint((tuple(state.shape), int(checksum(rounded))))


def parameter_fingerprints(
    names: Sequence[str] | None,
    parameters: Sequence[Any],
    sharded: Sequence[bool] = (),
    specs: Sequence[Any] | None = None,
) -> Sequence[int]:
    """Return a number for each parameter, from its name (where names are known), shape, dtype and placements.

    Args:
        names: The names, or None.
        parameters: The parameters.
        sharded: Which of them are shards in plain tensors.
        specs: Their `specs_of`, where these are known.
    """
    specs = specs_of(parameters) if specs is None else specs
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
