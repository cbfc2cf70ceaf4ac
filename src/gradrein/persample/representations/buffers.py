"""Memory for stored gradients, kept from one call to the next."""

import weakref
from collections.abc import MutableMapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..._torch.dtensor import stored_shard
from ..._torch.modes import has_function_modes
from ..tracing import is_traced

# The allocator keeps smaller blocks for the next call by itself.
_SMALLEST = 1 << 18
_Free = dict[tuple[Any, ...], list[Tensor]]


class Buffers:
    """Blocks of CPU memory that one result after another stores gradients of a model in.

    A step stores as much as the step before. Memory that is freed in between goes back to the operating system, and
    to get it again page by page can take longer than to fill it. Allocators of other devices keep it themselves.

    There is no lock: a signal handler may come between any two lines, and all changes are single operations on lists.
    """

    def __init__(self) -> None:
        self._free: _Free = {}
        self._free_before: _Free = {}

    def lend(self) -> "Loan":
        """Begin a call. What nobody took since the last one began is freed."""
        self._free, self._free_before = {}, self._free
        return Loan(self)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a block that nobody else has."""
        for free in (self._free, self._free_before):
            try:
                return free[shape, dtype].pop()
            except (KeyError, IndexError):
                continue
        return torch.empty(shape, dtype=dtype, device="cpu")

    def take_back(self, blocks: Sequence[Tensor]) -> None:
        """Keep blocks that nobody has any more."""
        for block in blocks:
            self._free.setdefault((tuple(block.shape), block.dtype), []).append(block)


class Loan:
    """The blocks that one result stores its gradients in. Copies of a result have no such blocks."""

    def __init__(self, buffers: Buffers | None = None) -> None:
        self._buffers = buffers
        self._blocks: list[Tensor] = []

    def __reduce__(self) -> tuple[type["Loan"], tuple[()]]:
        return Loan, ()

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return an uninitialised tensor to write to; None where torch's own allocator does as well."""
        if self._buffers is None or device.type != "cpu" or prod(shape) * dtype.itemsize < _SMALLEST:
            return None
        # A mode may keep what it sees.
        if is_traced() or torch.is_inference_mode_enabled() or has_function_modes():
            return None
        block = self._buffers.take(tuple(shape), dtype)
        self._blocks.append(block)
        return block

    def give_away(self, tensor: Tensor) -> None:
        """Note that the caller gets a tensor. If it lies in one of the blocks, that is never used again.

        What becomes of it is not known here: it may be resized, or sent to another process.
        """
        if self._blocks:
            memory = stored_shard(tensor).untyped_storage().data_ptr()
            self._blocks[:] = [one for one in self._blocks if one.untyped_storage().data_ptr() != memory]

    def end_with(self, result: object) -> None:
        """Return the blocks when the result that owns them is gone."""
        if self._buffers is not None:
            weakref.finalize(result, self._buffers.take_back, self._blocks).atexit = False


_of_models: MutableMapping[nn.Module, Buffers] = WeakIdKeyDictionary()


def lend_for(model: nn.Module | None) -> Loan:
    """Return a loan from the buffers of a model, which live as long as it does. Without a model there are none.

    A parameter could not have them: torch exchanges the insides of parameters, and refuses to where a weak reference
    points to one.
    """
    if model is None:
        return Loan()
    return (_of_models.get(model) or _of_models.setdefault(model, Buffers())).lend()
