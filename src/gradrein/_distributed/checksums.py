"""Checksums of tensors: the same number for the same bits in the same order, in every process."""

from functools import cache

import torch
from torch import Tensor

_BLOCK = 1 << 18
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers, as in well-mixed generators of 64 bits.
_STEP, _MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47


def checksum(tensor: Tensor) -> Tensor:
    """Return a number of 64 bits for the bits of a plain tensor, where it is."""
    bits = _bits(tensor)
    while True:
        blocks = torch.split(bits, _BLOCK)
        sums: list[Tensor] = [(block * _weights(bits.device)[: len(block)]).sum() for block in blocks]
        if len(sums) == 1:
            return sums[0]
        bits = torch.stack(sums)


def words(numbers: Tensor) -> Tensor:
    """Return integers of 64 bits as float64 values that hold 32 bits of them each, without rounding."""
    return torch.stack([numbers & 0xFFFFFFFF, numbers >> 32 & 0xFFFFFFFF], -1).flatten().double()


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    for dim, stride in enumerate(tensor.stride()):  # copies of one element lie in one place
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] else tensor
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


@cache
def _weights(device: torch.device) -> Tensor:
    numbers = torch.arange(1, _BLOCK + 1, dtype=torch.int64) * _STEP
    numbers = (numbers ^ (numbers >> 29)) * _MIX
    return ((numbers ^ (numbers >> 32)) | 1).to(device)
