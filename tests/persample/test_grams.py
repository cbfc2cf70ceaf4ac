"""Norms from Gram matrices made in strips, against gradients written down in float64."""

import pytest
import torch

from gradrein.persample.representations.base import Outer


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 64, 100, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_from_strips(rows, dtype):
    torch.manual_seed(rows)
    left, right = torch.randn(3, rows, 30).to(dtype), torch.randn(3, rows, 20).to(dtype)
    outer = Outer(left, right)
    outer.strategy = "gram"
    written = left.double().transpose(1, 2) @ right.double()
    torch.testing.assert_close(outer.norms(), written.flatten(1).norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_survive_cancellation(dtype):
    """Near-constant activations and gradients of zero mean: a Gram matrix alone would be all rounding."""
    left = torch.randn(3, 16, 64, dtype=torch.float32)
    left = (left - left.mean(1, keepdim=True)).to(dtype)
    right = (100 + 0.01 * torch.randn(3, 16, 64, dtype=torch.float32)).to(dtype)
    exact = (left.double().transpose(1, 2) @ right.double()).flatten(1).norm(dim=1)
    outer = Outer(left, right)
    outer.strategy = "gram"
    torch.testing.assert_close(outer.norms(), exact, rtol=1e-3, atol=0)
