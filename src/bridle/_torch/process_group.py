"""Process groups: the devices they communicate on, and assertions that wait for no device."""

from typing import Any

import torch
from torch import Tensor


def group_device(group: Any) -> torch.device:
    """Return the device for messages of a bare process group: the CPU where it can, else its only kind of device."""
    types = sorted(device.type for device in group._device_types)
    return torch.device("cpu" if "cpu" in types else types[0])


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device if the condition does not hold, without waiting for it."""
    torch._assert_async(condition, message)
