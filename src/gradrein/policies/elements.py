"""What a policy remembers for every element of a parameter, and how small tensors are handled together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.dtensor import local_tensor, specs_of, spread
from .._torch.ops import flatten as join
from .._torch.storage import plain
from ..errors import ArgumentError
from .base import GradientView

_SMALL = 2**16  # elements: on the CPU a larger tensor is worth an operation of its own, and no copy
_TOGETHER = 2**15  # elements: what is put end to end at once on the CPU
_ON_DEVICE = 2**26  # the same on a device, where each operation is a launch
_BLOCK = 2**15  # elements: the CPU keeps so many of a few vectors in its cache


class ElementMemory:
    """For each key a tensor of the shape of what this rank holds of its parameter.

    What is read together is kept end to end, so that the steps of a run neither join nor split it.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}  # parts of what is joined
        self._joined: dict[tuple[str, ...], Tensor] = {}
        self._specs: dict[str, Any] = {}  # how a DTensor is sharded

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle needs: each tensor by itself."""
        return {"_values": {key: t.clone() for key, t in self._values.items()}, "_joined": {}, "_specs": self._specs}

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
            self._specs.update(zip(keys, specs_of(grads.parameters), strict=True))

    def read(self, keys: Sequence[str], tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return what is remembered for some keys, end to end, to be changed in place.

        Args:
            keys: The keys.
            tensors: A tensor of the shape of each.
            like: For new ones a number for every element, or two for a complex one, in the dtype to compute in.
        """
        joined = self._joined.get(tuple(keys))
        if joined is None or joined.device != like.device or joined.dtype != like.dtype or _is_frozen(joined):
            joined = self._join(keys, tensors, like)
        return joined

    def _join(self, keys: Sequence[str], tensors: Sequence[Tensor], fresh: Tensor) -> Tensor:
        pieces = zip(keys, _split(fresh, tensors), strict=True)
        known = [real_parts(flatten([self._values[key]])) if key in self._values else piece for key, piece in pieces]
        joined = torch.cat([piece.to(fresh) for piece in known]) if len(known) > 1 else known[0].to(fresh, copy=True)
        self._joined = {own: t for own, t in self._joined.items() if set(own).isdisjoint(keys)}
        self._joined[tuple(keys)] = joined
        for key, t, piece in zip(keys, tensors, _split(joined, tensors), strict=True):
            two = piece.numel() > t.numel()
            self._values[key] = torch.view_as_complex(piece.view(*t.shape, 2)) if two else piece.view(t.shape)
        return joined

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
        memory = ElementMemory()
        memory._specs = dict(zip(values, specs_of([*values.values()]), strict=True))
        memory._values = {key: local_tensor(t).clone() for key, t in values.items()}
        return memory


def _is_frozen(t: Tensor) -> bool:
    """Return whether a tensor is from inference mode and cannot be changed now."""
    return t.is_inference() and not torch.is_inference_mode_enabled()


def together(grads: GradientView) -> list[list[int]]:
    """Return the indices of gradients to handle as one: those of a kind, while there is room; shards alone."""
    sets: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}  # with how many more elements it takes
    alone = grads.is_split
    for i, (p, g) in enumerate(zip(grads.parameters, grads.values, strict=True)):
        size, device = g.numel(), g.device
        if alone or (size >= _SMALL and device.type == "cpu"):
            sets.append([i])
            continue
        kind = (p.dtype, g.dtype, device)
        where, room = last.get(kind, ([], 0))
        if room < size or not where:
            where, room = [], _TOGETHER if device.type == "cpu" else _ON_DEVICE
            sets.append(where)
        where.append(i)
        last[kind] = where, room - size
    return sets


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of vectors that the cache of a CPU holds; on a device all of them at once."""
    size = _BLOCK if vectors[0].device.type == "cpu" else max(1, len(vectors[0]))
    return zip(*(torch.split(each, size) for each in vectors), strict=True)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors end to end, of sparse ones too; of a single one a view, where it can be."""
    return plain(join([t if t.layout is torch.strided else t.to_dense() for t in tensors]))


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
