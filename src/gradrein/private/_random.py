"""Random numbers for private training: apart from those of training, and the same on every rank."""

import hashlib
import math
from typing import TypeAlias

import torch
from torch import Tensor


class Seeded:
    """torch's generator, seeded: fast and repeatable, and no secret from who knows enough of its output."""

    def __init__(self, seed: int, purpose: str, device: torch.device) -> None:
        digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
        self._generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        self._on = {"generator": self._generator, "device": device}

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, dtype=torch.float64, **self._on)  # type: ignore[call-overload, no-any-return]

    def normal(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randn(shape, dtype=dtype, **self._on).to(device)  # type: ignore[call-overload, no-any-return]

    def state(self) -> Tensor:
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        self._generator.set_state(state.cpu())


class Secure:
    """SHAKE-256 in counter mode, with a key of 256 bits from the operating system that is never written down.

    Normal numbers are made by Box and Muller's method in float64, and each is half the sum of four: what rounding
    tells about it no longer tells what it was made from. They end at 17 standard deviations; what is left out has
    a probability of about 1e-16.
    """

    def __init__(self, key: bytes, purpose: str) -> None:
        self._key, self._counter = key + purpose.encode(), 0

    def uniform(self, size: int) -> Tensor:
        stream = hashlib.shake_256(self._key + self._counter.to_bytes(8, "little")).digest(8 * max(1, size))
        self._counter += 1
        whole = torch.frombuffer(bytearray(stream), dtype=torch.int64)[:size] & (2**53 - 1)
        return (whole.double() + 0.5) * 2.0**-53

    def normal(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        radius, angle = self.uniform(4 * shape.numel()).view(2, -1)
        radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        four = torch.cat([radius * angle.cos(), radius * angle.sin()]).view(4, *shape)
        return (four.sum(0) / 2).to(device, dtype)

    def state(self) -> Tensor:
        return torch.tensor([self._counter])

    def set_state(self, state: Tensor) -> None:
        self._counter = int(state)


Source: TypeAlias = Seeded | Secure
