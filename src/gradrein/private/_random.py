"""Random numbers for private training: they follow from a key and the number of a step, and are those of every rank."""

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Normals: TypeAlias = Callable[[torch.Size, torch.dtype], Tensor]
"""Draws normal numbers, others at each call."""


class Seeded:
    """torch's generators, seeded for each step: fast and repeatable, and no secret from who knows enough of them."""

    def __init__(self, key: bytes, device: torch.device) -> None:
        self._first = int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
        self._cpu, self._device = torch.Generator(), torch.Generator(device)

    def uniform(self, step: int, size: int) -> Tensor:
        """Return as many numbers between 0 and 1 for the batch of a step."""
        # Neighbouring seeds, even and odd: a generator of the CPU takes 32 bits, and hashes of steps would collide.
        return torch.rand(size, dtype=torch.float64, generator=self._cpu.manual_seed(self._first + 2 * step))

    def normals(self, step: int) -> Normals:
        """Return what draws the noise of a step."""
        generator = self._device.manual_seed(self._first + 2 * step + 1)
        return lambda shape, dtype: torch.randn(shape, dtype=dtype, generator=generator, device=generator.device)


class Secure:
    """SHAKE-256 of a key of 256 bits from the operating system that is never written down, and of what is drawn.

    Normal numbers are made by Box and Muller's method in float64, and each is half the sum of four: what rounding
    tells about it no longer tells what it was made from. They end at 17 standard deviations; what is left out has
    a probability of about 1e-16.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def uniform(self, step: int, size: int, draw: int = 0) -> Tensor:
        """Return as many numbers between 0 and 1 for the batch of a step, or for a draw of its noise."""
        stream = hashlib.shake_256(self._key + f"{step} {draw}".encode()).digest(8 * max(1, size))
        whole = torch.frombuffer(bytearray(stream), dtype=torch.int64)[:size] & (2**53 - 1)
        return (whole.double() + 0.5) * 2.0**-53

    def normals(self, step: int) -> Normals:
        """Return what draws the noise of a step."""
        draws = itertools.count(1)

        def normal(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            radius, angle = self.uniform(step, 4 * shape.numel(), next(draws)).view(2, -1)
            radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
            four = torch.cat([radius * angle.cos(), radius * angle.sin()]).view(4, *shape)
            return (four.sum(0) / 2).to(dtype)

        return normal
