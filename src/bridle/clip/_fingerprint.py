"""Short numbers for what a rank was called with, that are the same in every process that was called with the same.

Private torch: `DTensor._spec`, which costs a tenth of the properties that return its parts. Checked on torch 2.13.0.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _measure

__all__ = ["combined", "fingerprints", "setting", "settings"]

_KEPT = 2**52 - 1  # what a float64 holds exactly
_types: dict[torch.dtype, int] = {}


def fingerprints(names: Sequence[str] | None, parameters: Sequence[Any], pieces: Sequence[bool] = ()) -> list[int]:
    """A number for each parameter, from its name (where names are known), shape, dtype and placements.

    Args:
        names: the names, or None.
        parameters: the parameters.
        pieces: which of them are pieces in plain tensors, whose shapes may differ from rank to rank.
    """
    last: Any = None
    layout = 0
    found = []
    for i, p in enumerate(parameters):
        spec = getattr(p, "_spec", None)
        about = p if spec is None else spec.tensor_meta
        placements = spec and spec.placements
        if placements is not last and placements != last:
            last, layout = placements, zlib.crc32(repr(placements).encode())
        shape = p.dim() if pieces and pieces[i] else about.shape
        # Numbers only: the hash of a string is another one in every process.
        name = 0 if names is None else zlib.crc32(names[i].encode())
        found.append(hash((name, shape, _types.get(about.dtype) or _type(about.dtype), layout)))
    return found


def combined(numbers: Iterable[int]) -> int:
    """One number for several, in their order."""
    return hash(tuple(numbers)) & _KEPT


def settings(policy: Any) -> str:
    """A policy, or a mapping from patterns to policies, in words that are the same on every rank."""
    if isinstance(policy, Mapping):
        return "{" + ", ".join(f"{pattern!r}: {settings(rule)}" for pattern, rule in policy.items()) + "}"
    kind = type(policy).__name__.lstrip("_")
    if not type(policy).__module__.startswith("bridle."):  # what someone else's holds may be about one rank
        return kind
    own = (f"{name}={setting(value)}" for name, value in vars(policy).items() if not name.startswith("_"))
    return f"{kind}({', '.join(own)})"


def setting(value: Any) -> str:
    """A number, a tensor of one, or a policy, in such words. A tensor that would have to be waited for is only one."""
    if isinstance(value, Tensor):
        return repr(value.item()) if _measure.readable_now([value]) else "a tensor"
    return repr(value) if value is None or isinstance(value, bool | int | float | str | tuple) else settings(value)


def _type(dtype: torch.dtype) -> int:
    _types[dtype] = zlib.crc32(str(dtype).encode())
    return _types[dtype]
