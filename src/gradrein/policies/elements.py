"""What a policy remembers for every element of a parameter, and how small tensors are handled together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import local_tensor, spec_of, spread
from .._torch.storage import plain
from ..errors import ArgumentError
from .base import GradientView

_SMALL = 2**16  # elements: a larger tensor is worth an operation of its own, and no copy
_TOGETHER = 2**20  # elements: what is put end to end at once


class ElementMemory:
    """For each key a tensor of the shape of what this rank holds of its parameter."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._specs: dict[str, Any] = {}  # how a DTensor is sharded

    def check(self, grads: GradientView) -> None:
        """Refuse parameters of another shape than they had before, and note how they are sharded.

        Raises:
            ArgumentError: (a ValueError) One policy was used for two models.
        """
        keys = grads.keys()
        for key, t in zip(keys, grads.weights(), strict=True):
            before = self._values.get(key, t).shape
            if before != t.shape:
                raise ArgumentError(
                    f"the parameter {key!r} has shape {tuple(t.shape)} and had {tuple(before)} before: one policy was "
                    "used for two models, or loaded from another one. Build a policy for each."
                )
        if grads.is_split:
            self._specs.update(zip(keys, map(spec_of, grads.parameters), strict=True))

    def read(self, keys: Sequence[str], tensors: Sequence[Tensor], fresh: Tensor) -> Tensor:
        """Return what is remembered for some keys, end to end; `fresh`, whose device and dtype it has, for new ones.

        Args:
            keys: The keys.
            tensors: A tensor of the shape of each.
            fresh: A number for every element, or two for a complex one.
        """
        pieces = zip(keys, _split(fresh, tensors), strict=True)
        known = [real_parts(flatten([self._values[key]])) if key in self._values else piece for key, piece in pieces]
        return known[0].to(fresh) if len(known) == 1 else torch.cat([piece.to(fresh) for piece in known])

    def write(self, keys: Sequence[str], tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Store what was read and changed."""
        for key, t, piece in zip(keys, tensors, _split(flat, tensors), strict=True):
            two = piece.numel() > t.numel()
            self._values[key] = torch.view_as_complex(piece.view(*t.shape, 2)) if two else piece.view(t.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by key; of a sharded parameter, one that is sharded as it is."""
        # In one order on all ranks: one that lacked a gradient for some steps has put it last.
        kept = {key: spread(self._values[key].clone(), self._specs.get(key)) for key in sorted(self._values)}
        return {"keys": list(kept), "values": kept}

    def loaded(self, saved: Any) -> ElementMemory:
        """Return such a memory with a saved state.

        Raises:
            ArgumentError: (a ValueError) It is damaged, or not what `state_dict` returned.
        """
        values = saved.get("values") if isinstance(saved, Mapping) else None
        if not isinstance(values, Mapping) or not all(isinstance(t, Tensor) for t in values.values()):
            raise ArgumentError(
                "the saved state of the elements is missing or damaged: load what `state_dict()` returned."
            )
        missing = sorted(set(saved.get("keys", ())) - set(values))
        if missing:
            raise ArgumentError(
                f"the state of {len(missing)} of {len(values) + len(missing)} parameters is missing, {missing[0]!r} "
                "among them. torch.distributed.checkpoint only fills in existing entries: clip once with the policy "
                "(dry_run=True is enough) before you load into its state_dict()."
            )
        found = ElementMemory()
        found._specs = {key: spec_of(t) for key, t in values.items()}
        found._values = {key: local_tensor(t).clone() for key, t in values.items()}
        return found


def together(grads: GradientView) -> list[list[int]]:
    """Return the indices of gradients to handle as one: small strided ones of a kind; others, and shards, alone."""
    found: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}  # with how many more elements it takes
    alone = grads.is_split
    for i, (p, g) in enumerate(zip(grads.parameters, grads.values, strict=True)):
        size = g.numel()
        if alone or g.layout is not torch.strided or size >= _SMALL:
            found.append([i])
            continue
        kind = (p.dtype, g.dtype, g.device)
        where, room = last.get(kind, ([], 0))
        if room < size or not where:
            where, room = [], _TOGETHER
            found.append(where)
        where.append(i)
        last[kind] = where, room - size
    return found


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of strided tensors end to end; of a single one a view, where it can be."""
    flat = [t.reshape(-1) for t in tensors]
    return plain(flat[0] if len(flat) == 1 else torch.cat(flat))


def real_parts(flat: Tensor) -> Tensor:
    """Return a vector with a complex element as its two parts, and half types as float32."""
    if flat.is_complex():
        return torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def _split(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the piece of each tensor."""
    sizes = [t.numel() for t in tensors]
    each = len(flat) // max(sum(sizes), 1)  # two for the parts of a complex element
    return flat.split_with_sizes([each * size for size in sizes])
