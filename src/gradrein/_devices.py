"""What a device can do: be read without waiting, accumulate in float64."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ._torch.modes import fakes_values

_is_cpu = attrgetter("is_cpu")
WITHOUT_FLOAT64 = {"mps"}


def readable_now(tensors: Sequence[Tensor]) -> bool:
    """Return whether values can be read without waiting for a device or breaking a compiled graph."""
    return not torch.compiler.is_compiling() and all(map(_is_cpu, tensors)) and not fakes_values(tensors)


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape only: it is on the meta device, or fake."""
    return not torch.compiler.is_compiling() and (tensor.is_meta or fakes_values([tensor]))


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type to accumulate in: float64, where the device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64
