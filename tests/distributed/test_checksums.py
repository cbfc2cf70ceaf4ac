"""Checksums of tensors, which ranks compare, in one process."""

import pytest
import torch

from gradrein._distributed.checksums import checksum, words

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


def values(size, dtype):
    return torch.randn(size).to(dtype) if dtype is not torch.bool else torch.rand(size) > 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 1 << 18, (1 << 18) + 1, 600_001])
def test_each_bit_and_its_place_count(dtype, size):
    x = values(size, dtype)
    assert checksum(x) == checksum(x.clone())
    for i in {0, size // 2, size - 1}:
        y = x.clone()
        y[i] = ~y[i] if dtype is torch.bool else y[i] + 1
        assert checksum(x) != checksum(y)
    y = x.clone()
    y[0], y[-1] = x[-1].clone(), x[0].clone()
    assert (checksum(x) == checksum(y)) == torch.equal(x, y)


def test_layouts_of_the_same_values():
    x = torch.randn(6, 5)
    assert checksum(x) == checksum(x.T.contiguous().T) == checksum(x.to_sparse()) == checksum(x.flatten())
    row = torch.randn(1, 5)
    assert checksum(row.expand(9, 5)) == checksum(row)
    z = torch.randn(4, dtype=torch.complex64)
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)
    assert checksum(torch.zeros(0, 3)) == 0


def test_words_hold_every_number():
    numbers = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345678901234567])
    low, high = words(numbers).view(-1, 2).long().T
    assert torch.equal(low | high << 32, numbers)
    assert words(torch.zeros(0, dtype=torch.int64)).shape == (0,)
