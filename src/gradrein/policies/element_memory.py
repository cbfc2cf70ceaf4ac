"""What a policy remembers for every element of a parameter: of small ones end to end, for few operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Size, Tensor

from .. import _kernels
from .._torch.dtensor import local_tensor, spec_of, spread
from .._torch.storage import plain
from ..errors import ArgumentError
from .base import GradientView
from .state import check_complete

Keys: TypeAlias = tuple[str, ...]
_Kind: TypeAlias = tuple[Size, torch.dtype, torch.device]
_Kinds: TypeAlias = tuple[bytes, bytes] | tuple[list[_Kind], list[torch.layout], list[torch.layout]]

_KIND = attrgetter("shape", "dtype", "device")  # of a thousand tensors three times faster than a loop
_LAYOUT = attrgetter("layout")

_SMALL = 2**16  # elements: a larger tensor is worth an operation of its own, and no copy
_TOGETHER = 2**20  # elements: what is put end to end at once


@dataclass(frozen=True)
class Chunk:
    """Tensors that are handled as one.

    Attributes:
        keys: What they are remembered by.
        where: Their indices in the call.
        rows: The same as a tensor.
        sizes: How many elements each has.
    """

    keys: Keys
    where: list[int]
    rows: Tensor
    sizes: Tensor

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the tensors of the call that are in it."""
        if len(self.where) == len(tensors):  # all, in order
            return list(tensors)
        return [tensors[i] for i in self.where]

    def columns(self, values: Tensor) -> Tensor:
        """Return those of the columns, one for each tensor of the call, that are in it."""
        return values if len(self.where) == values.shape[1] else values.index_select(1, self.rows)

    def spread(self, values: Tensor, device: torch.device) -> Tensor:
        """Return the value of each tensor of the call once for every element; of a single tensor, the value."""
        own = values[self.rows.to(values.device)].to(device)
        return own if len(self.where) == 1 else own.repeat_interleave(self.sizes.to(device))


class ElementMemory:
    """A vector for each key, as long as its parameter has elements. Vectors that are read together lie end to end."""

    def __init__(self) -> None:
        self._shapes: dict[str, Size] = {}
        self._flat: dict[Keys, Tensor] = {}
        self._planned_for: tuple[list[str], _Kinds] | None = None
        self._plan: list[Chunk] = []
        self._specs: dict[str, Any] = {}  # how a DTensor is sharded
        self._planned: weakref.ref[GradientView] | None = None

    def plan(self, grads: GradientView, tensors: list[Tensor], refuse: Callable[[GradientView], None]) -> list[Chunk]:
        """Return which tensors to handle as one: small ones of a kind with a strided gradient; others alone.

        Where some lie on several ranks each is handled alone, in order.

        Args:
            grads: The gradients of the call. Asked again about the same, the answer is the same.
            tensors: What is remembered for each: what this rank holds of its parameter, or of the gradient itself.
            refuse: Raises for gradients that cannot be remembered. Not called for such as were accepted before.

        Raises:
            ArgumentError: (a ValueError) A tensor has another shape than its key had before.
        """
        if self._planned is not None and self._planned() is grads:
            return self._plan
        keys, spans = grads.keys(), grads.spans_ranks()
        kinds = _kinds(tensors, grads.values)
        if self._planned_for != (keys, kinds):
            refuse(grads)
            self._check_shapes(keys, tensors)
            together = [[i] for i in range(len(keys))] if spans else _together(tensors, grads.values)
            self._plan = [_chunk(where, keys, tensors) for where in together]
            self._specs = dict(zip(keys, map(spec_of, grads.parameters), strict=True)) if spans else {}
            self._planned_for = keys, kinds
        self._planned = None if torch.compiler.is_compiling() else weakref.ref(grads)
        return self._plan

    def __getstate__(self) -> dict[str, Any]:
        """Return what is remembered. A plan is about the gradients of this process, and stays here."""
        return {"_shapes": self._shapes, "_flat": self._flat, "_specs": self._specs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from it."""
        self.__init__()  # type: ignore[misc]
        vars(self).update(state)

    def _check_shapes(self, keys: Sequence[str], tensors: Sequence[Tensor]) -> None:
        for key, t in zip(keys, tensors, strict=True):
            before = self._shapes.get(key, t.shape)
            if before != t.shape:
                raise ArgumentError(
                    f"the parameter {key!r} has shape {tuple(t.shape)} and had {tuple(before)} before: one policy was "
                    "used for two models, or loaded from another one. Build a policy for each."
                )

    def known(self, keys: Keys) -> Tensor | None:
        """Return what is remembered for these keys together; None where something has to be put together first."""
        return self._flat.get(keys)

    def read(self, keys: Keys, tensors: Sequence[Tensor], fresh: Tensor) -> Tensor:
        """Return what is remembered for these tensors, with the device and dtype of `fresh`, which new keys start from.

        Args:
            keys: The keys.
            tensors: The tensor of each.
            fresh: A vector: as many numbers for each element of these tensors as are remembered.
        """
        found = self._flat.get(keys)  # hashing many keys takes long: once
        if found is None:
            self._shapes.update(zip(keys, (t.shape for t in tensors), strict=True))
            known = self._take(keys)
            pieces = self._pieces(keys, fresh)
            found = self._flat[keys] = torch.cat([known.get(key, new).to(fresh) for key, new in pieces])
        elif found.dtype != fresh.dtype or found.device != fresh.device:
            found = self._flat[keys] = found.to(fresh)
        return found

    def write(self, keys: Keys, flat: Tensor) -> None:
        """Store what was read and changed."""
        self._flat[keys] = flat

    def _take(self, keys: Keys) -> dict[str, Tensor]:
        """Return what is remembered for these keys under other combinations, which are dissolved."""
        wanted, found = set(keys), dict[str, Tensor]()
        for held in [held for held in self._flat if not wanted.isdisjoint(held)]:
            for key, piece in self._pieces(held, self._flat.pop(held)):
                if key in wanted:
                    found[key] = piece
                else:
                    self._flat[(key,)] = piece.clone()
        return found

    def _pieces(self, keys: Keys, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        sizes = [self._shapes[key].numel() for key in keys]
        each = len(flat) // max(sum(sizes), 1)  # two for the parts of a complex element
        return zip(keys, flat.split_with_sizes([each * size for size in sizes]), strict=True)

    def state_dict(self) -> dict[str, Any]:
        """Return vectors by key, of a sharded parameter a tensor that is sharded as it is; and shapes."""
        pieces = [(key, t) for keys, held in self._flat.items() for key, t in self._pieces(keys, held)]
        # In one order on all ranks: one that lacked a gradient for some steps has put it last.
        flat = {key: t.clone() for key, t in sorted(pieces, key=lambda piece: piece[0])}
        sharded = {key: spec for key in flat if (spec := self._specs.get(key)) is not None}
        for key, spec in sharded.items():
            flat[key] = spread(_shaped(flat[key], self._shapes[key]), spec)
        shapes = {key: tuple(self._shapes[key]) for key in flat if key not in sharded}
        return {"shapes": shapes, "flat": flat, "keys": list(flat)}

    def load_state_dict(self, saved: Any) -> None:
        """Continue from what was remembered.

        Raises:
            ArgumentError: (a ValueError) It is damaged, or not what `state_dict` returned.
        """
        _check_saved(saved)
        flat = saved["flat"]
        check_complete(saved["keys"], flat)
        self._shapes = {key: Size(shape) for key, shape in saved["shapes"].items()}
        self._specs = {key: spec_of(t) for key, t in flat.items()}
        self._flat = {}
        for key, t in flat.items():
            own = local_tensor(t)
            if self._specs[key] is not None:
                self._shapes[key] = own.shape
                own = torch.view_as_real(own) if own.is_complex() else own
            self._flat[(key,)] = own.reshape(-1).clone()
        self._planned_for = self._planned = None


def _check_saved(saved: Any) -> None:
    known = isinstance(saved, Mapping) and all(key in saved for key in ("flat", "shapes", "keys"))
    if known and isinstance(saved["flat"], Mapping) and isinstance(saved["shapes"], Mapping):
        damaged = [key for key, t in saved["flat"].items() if not _fits(t, saved["shapes"].get(key))]
        if not damaged:
            return
        raise ArgumentError(
            f"the saved state of {damaged[0]!r} does not have the size of its parameter: it is damaged."
        )
    raise ArgumentError("the saved state of the elements is missing or damaged: load what `state_dict()` returned.")


def _fits(vector: Any, shape: Any) -> bool:
    """Return whether a saved vector has one or two numbers for each element; a sharded one has a shape of its own."""
    if not isinstance(vector, Tensor) or shape is None:
        return isinstance(vector, Tensor) and spec_of(vector) is not None
    return vector.numel() in (Size(shape).numel(), 2 * Size(shape).numel())


def _shaped(flat: Tensor, shape: Size) -> Tensor:
    """Return a vector in the shape of a parameter; of two numbers for each element, as complex ones."""
    if flat.numel() == shape.numel():
        return flat.view(shape)
    return torch.view_as_complex(flat.view(*shape, 2))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of the strided tensors of a chunk end to end; of a single tensor a view, where it can be."""
    if len(tensors) == 1:
        return plain(tensors[0].reshape(-1))
    join = torch.cat if tensors[0].dim() else torch.stack
    return plain(join(list(tensors)).reshape(-1))


def _kinds(tensors: list[Tensor], grads: list[Tensor]) -> _Kinds:
    """Return all that a plan depends on: of each tensor its kind, of each gradient its layout, and odd layouts.

    A backend tells sooner, where all are strided. torch keeps a strided gradient for strided parameters only, so the
    layouts of the tensors themselves are read only where a gradient is not strided.
    """
    backend = _kernels.native(tensors, None)
    if backend is not None and (kinds := backend.kinds(tensors)) is not None:
        of_grads = kinds if grads is tensors else backend.kinds(grads)
        if of_grads is not None:
            return kinds, of_grads
    layouts = [*map(_LAYOUT, grads)]
    is_plain = layouts.count(torch.strided) == len(layouts)
    return [*map(_KIND, tensors)], layouts, [] if is_plain else [*map(_LAYOUT, tensors)]


def _together(tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of each chunk, by the kinds of tensors and the layouts of gradients.

    Its tensors differ in their first dimension only, so that `cat` takes them.
    """
    found: list[list[int]] = []
    last: dict[tuple[Any, ...], tuple[list[int], int]] = {}  # with how many more elements it takes
    for i, ((shape, dtype, device), layout) in enumerate(zip(map(_KIND, tensors), map(_LAYOUT, grads), strict=True)):
        size = shape.numel()
        if layout is not torch.strided or size >= _SMALL:
            found.append([i])
            continue
        kind = (len(shape), shape[1:], dtype, device)
        where, room = last.get(kind, ([], 0))
        if room < size or not where:
            where, room = [], _TOGETHER
            found.append(where)
        where.append(i)
        last[kind] = where, room - size
    return found


def _chunk(where: list[int], keys: list[str], tensors: Sequence[Tensor]) -> Chunk:
    sizes = torch.tensor([tensors[i].numel() for i in where])
    return Chunk(tuple(keys[i] for i in where), where, torch.tensor(where), sizes)
