"""Read numbers that steps left on devices: many steps at once, so that training rarely waits."""

from collections.abc import Callable
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from ..._devices import accumulation_dtype

Values: TypeAlias = dict[str, list[Tensor]]
"""What a step measured, by name: numbers and vectors that may be on a device."""

Numbers: TypeAlias = dict[str, list[float]]
"""The same after reading."""


class Readback:
    """Keeps what steps measured until `flush`, which waits once for each device.

    Args:
        flush_every: Flush when so many steps wait. What is on the CPU is read at once.
    """

    def __init__(self, flush_every: int) -> None:
        self._flush_every = flush_every
        self._waiting: list[tuple[Values, Callable[[Numbers], None]]] = []

    def add(self, values: Values, then: Callable[[Numbers], None]) -> None:
        """Call `then` with the numbers, in the order of the steps."""
        self._waiting.append((values, then))
        ready = all(t.is_cpu for tensors in values.values() for t in tensors)
        if ready or len(self._waiting) >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        """Read everything."""
        waiting, self._waiting = self._waiting, []
        numbers = iter(_read([t for values, _ in waiting for tensors in values.values() for t in tensors]))
        for values, then in waiting:
            then({name: [n for _ in tensors for n in next(numbers)] for name, tensors in values.items()})


def _read(tensors: list[Tensor]) -> list[list[float]]:
    read: dict[int, list[float]] = {}
    for device in {t.device for t in tensors}:
        at = [i for i, t in enumerate(tensors) if t.device == device]
        wide = accumulation_dtype(device)
        numbers = iter(torch.cat([tensors[i].detach().reshape(-1).to(wide) for i in at]).tolist())
        for i in at:
            read[i] = list(islice(numbers, tensors[i].numel()))
    return [read[i] for i in range(len(tensors))]
