"""Norms from Gram matrices made in strips and shared, against gradients written down in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein
from gradrein.persample.representations import gram_cache as _grams
from gradrein.persample.representations import outer
from gradrein.persample.representations.gram_cache import GramCache
from gradrein.persample.representations.outer import Outer

from .oracle import flat, loop


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 64, 100, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_from_strips(rows, dtype):
    torch.manual_seed(rows)
    left, right = torch.randn(3, rows, 30).to(dtype), torch.randn(3, rows, 20).to(dtype)
    outer = Outer(left, right)
    outer.how = "gram"
    written = left.double().transpose(1, 2) @ right.double()
    torch.testing.assert_close(outer.squared_norms(), written.flatten(1).square().sum(1), rtol=1e-5, atol=0)


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).square().mean((1, 2))


def test_projections_of_one_input_share_its_gram(monkeypatch):
    torch.manual_seed(0)
    model, x = Attention(96).double(), torch.randn(4, 8, 96, dtype=torch.float64)
    made = []
    real = _grams._strips
    monkeypatch.setattr(_grams, "_strips", lambda factor: made.append(factor) or real(factor))
    ps = gradrein.per_sample(model(x), model)
    found = ps.norms(per_parameter=True)
    assert len(made) == 4  # the input once, and the gradient of each projection
    for name, gradients in ps.grads().items():
        torch.testing.assert_close(found[name], gradients.flatten(1).norm(dim=1))


def test_a_shared_gram_is_let_go_of_after_its_last_use():
    x = torch.randn(2, 5, 3)
    grams = GramCache([x, x, x])
    first, second = grams.strips(x), grams.strips(x.detach())
    assert first is second
    assert grams.strips(x) is first
    assert not grams._kept


def test_large_grams_are_not_kept(monkeypatch):
    monkeypatch.setattr(_grams, "_KEPT_BYTES", 10)
    x = torch.randn(2, 5, 3)
    grams = GramCache([x, x])
    assert torch.equal(next(iter(grams.strips(x))), next(iter(grams.strips(x))))
    assert not grams._kept


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
