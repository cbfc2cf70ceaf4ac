"""Let torch's distributed tests run without GPUs, each rank a process on the CPU."""

import functools

import torch
from torch.testing._internal import common_distributed


def allow_cpu(count: int) -> None:
    """Let tests that ask for several devices have `count` processes instead."""
    skip = functools.partial(common_distributed.skip_if_lt_x_gpu, allow_cpu=True)
    common_distributed.skip_if_lt_x_gpu = skip
    torch.cpu.device_count = torch.accelerator.device_count = lambda: count
