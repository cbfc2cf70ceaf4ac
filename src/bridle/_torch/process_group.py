"""Process groups: the devices they communicate on, and assertions that wait for no device."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_device(group: Any) -> torch.device:
    """Return the device for messages of a bare process group: the CPU where it can, else its only kind of device."""
    types = sorted(device.type for device in group._device_types)
    return torch.device("cpu" if "cpu" in types else types[0])


def all_gather_single(rows: Tensor, sent: Tensor, group: Any) -> None:
    """Write the rows of every rank of a process group, in the order of ranks."""
    older = "all_gather_into_tensor"  # the name before this one
    getattr(dist, "all_gather_single" if hasattr(dist, "all_gather_single") else older)(rows, sent, group=group)


def reduce_scatter_single(found: Tensor, rows: Tensor, group: Any) -> None:
    """Write this rank's row of the sum over the ranks of a process group."""
    older = "reduce_scatter_tensor"  # the name before this one
    getattr(dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else older)(
        found, rows, group=group
    )


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device if the condition does not hold, without waiting for it."""
    torch._assert_async(condition, message)
