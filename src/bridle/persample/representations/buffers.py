"""Memory for stored gradients, kept from one call to the next."""

import threading
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..._torch.storage import holders
from ..tracing import is_traced

# The allocator keeps smaller blocks for the next call by itself.
_SMALLEST = 1 << 18


@dataclass(eq=False)
class _Buffer:
    memory: Tensor
    holders_if_free: tuple[int, int]
    used: bool = True


class Buffers:
    """Blocks of CPU memory that are handed out again once nothing else refers to them.

    A step stores as much as the step before. Memory that is freed in between goes back to the operating system, and
    to get it again page by page can take longer than to fill it. Allocators of other devices keep it themselves.
    """

    def __init__(self) -> None:
        self._kept: list[_Buffer] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin a call: forget the blocks that the last one did not use."""
        with self._lock:
            self._kept = [buffer for buffer in self._kept if buffer.used]
            for buffer in self._kept:
                buffer.used = False

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return an uninitialised tensor to write to; None where torch's own allocator does as well."""
        size = prod(shape)
        if is_traced() or device.type != "cpu" or size * dtype.itemsize < _SMALLEST:
            return None
        with self._lock:
            for buffer in self._kept:
                memory = buffer.memory
                if memory.numel() == size and memory.dtype == dtype and holders(memory) == buffer.holders_if_free:
                    buffer.used = True
                    return memory.view(tuple(shape))
            memory = torch.empty(size, dtype=dtype, device=device)
            self._kept.append(_Buffer(memory, holders(memory)))
            return memory.view(tuple(shape))


_of_parameters: MutableMapping[Tensor, Buffers] = WeakIdKeyDictionary()


def buffers_of(parameters: Iterable[Tensor]) -> Buffers:
    """Return the buffers of some parameters, which are kept for as long as the first of them lives."""
    first = next(iter(parameters), None)
    if first is None:
        return Buffers()
    return _of_parameters.get(first) or _of_parameters.setdefault(first, Buffers())
