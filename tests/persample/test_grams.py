"""Norms from Gram matrices made in strips, against gradients written down in float64."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.persample.representations import outer
from gradrein.persample.representations.outer import Outer

from .oracle import flat, loop


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 64, 100, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_from_strips(rows, dtype):
    torch.manual_seed(rows)
    left, right = torch.randn(3, rows, 30).to(dtype), torch.randn(3, rows, 20).to(dtype)
    outer = Outer(left, right, "gram")
    written = left.double().transpose(1, 2) @ right.double()
    torch.testing.assert_close(outer.norms(), written.flatten(1).norm(dim=1), rtol=1e-5, atol=0)


def model_of_tokens(samples):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).float()
    x = torch.randn(samples, 16, 64, dtype=torch.float32)
    return model, lambda: model(x).square().sum((1, 2))


@pytest.mark.parametrize(("samples", "stored"), [(2, 2), (4, 2), (6, 1), (40, 0)])
def test_few_samples_are_written_down_instead_of_made_into_grams(monkeypatch, samples, stored):
    monkeypatch.setattr(outer, "TRAFFIC", 1.0)  # as if memory were faster, for small layers to pay
    model, losses = model_of_tokens(samples)
    ps = gradrein.per_sample(losses(), model)
    assert ps.plan().count("gram") == 2, ps.plan()
    norms = ps.clip_(1.0)
    assert ps.plan().count("gram") == 2 - stored, ps.plan()
    expected = loop(losses(), dict(model.named_parameters()))
    each = flat(expected)
    torch.testing.assert_close(norms, each.norm(dim=1), rtol=1e-4, atol=1e-5)
    clipped = (each * (1 / each.norm(dim=1)).clamp(max=1)[:, None]).mean(0)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, clipped, rtol=1e-4, atol=1e-5)


def test_no_gram_is_saved_beyond_the_memory_budget(monkeypatch):
    monkeypatch.setattr(outer, "TRAFFIC", 1.0)
    model, losses = model_of_tokens(2)
    ps = gradrein.per_sample(losses(), model, memory_budget=0)
    ps.clip_(1.0)
    assert ps.plan().count("gram") == 2, ps.plan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_survive_cancellation(dtype):
    """Near-constant activations and gradients of zero mean: a Gram matrix alone would be all rounding."""
    left = torch.randn(3, 16, 64, dtype=torch.float32)
    left = (left - left.mean(1, keepdim=True)).to(dtype)
    right = (100 + 0.01 * torch.randn(3, 16, 64, dtype=torch.float32)).to(dtype)
    exact = (left.double().transpose(1, 2) @ right.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(Outer(left, right, "gram").norms(), exact, rtol=1e-3, atol=0)
