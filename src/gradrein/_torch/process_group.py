"""Process groups: the devices they communicate on, what they have run, and assertions that wait for no device."""

import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_device(group: Any) -> torch.device:
    """Return the device for messages of a bare process group: the CPU where it can, else its only kind of device."""
    types = sorted(device.type for device in group._device_types)
    return torch.device("cpu" if "cpu" in types else types[0])


def assert_async(condition: Tensor, message: str) -> None:
    """Fail on the device if the condition does not hold, without waiting for it."""
    torch._assert_async(condition, message)


def is_collective(node: Any) -> bool:
    """Return whether an op of the graph is one of torch's own collectives on plain tensors."""
    made_by = getattr(type(node), "_forward_cls", None)
    return made_by is not None and (
        made_by.__module__.startswith("torch.distributed.nn.") or "_c10d_functional" in type(node).__name__
    )


def messages_sent() -> dict[str, int]:
    """Return how many collectives each process group of this process has run, by its name, where it counts them."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    groups: Any = dist.distributed_c10d._world.pg_names
    counts: dict[str, int] = {}
    for group, name in groups.items():
        with suppress(RuntimeError):  # a backend that does not count
            counts[name] = group._get_sequence_number_for_group()
    return counts


_SCHEDULES = "torch.distributed.pipelining.schedules"


def is_scheduled() -> bool:
    """Return whether this is called by a pipeline schedule, as the loss function of its last stage is."""
    frame: FrameType | None = sys._getframe() if _SCHEDULES in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCHEDULES:
            return True
        frame = frame.f_back
    return False
