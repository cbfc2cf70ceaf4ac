"""Norms, clipped sums and inner products of gradients as small and as large as float32 has them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradrein
from gradrein import errors

from .cases import Calls
from .oracle import flat, loop

B, T, D = 4, 5, 6


def build(layer, x):
    """Return a layer and a linear function of what it gives, so that sizes are those of the weights of the losses."""

    def losses(weights):
        out = layer(x.to(layer_dtype(layer))) if x.is_floating_point() else layer(x)
        slope = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype)
        return (out.flatten(1) * slope).sum(1) * weights.to(out.dtype)

    return layer, losses


def layer_dtype(layer):
    return next(layer.parameters()).dtype


def tied():
    table = nn.Embedding(7, D)
    ids = torch.randint(7, (B, T))
    model = Calls(lambda m, ids: F.linear(m.table(ids) + 1, m.table.weight), table=table)
    return build(model, ids)


FORMS = {
    "one_row": lambda: build(nn.Linear(D, 3), torch.randn(B, D)),
    "gram": lambda: build(nn.Linear(40, 30), torch.randn(B, 3, 40)),
    "streamed": lambda: build(nn.Linear(D, 2), torch.randn(B, 50, D)),
    "conv": lambda: build(nn.Conv1d(3, 4, 3), torch.randn(B, 3, 9)),
    "conv_gram": lambda: build(nn.Conv2d(8, 128, 1), torch.randn(B, 8, 2, 2)),
    "rows": lambda: build(nn.Embedding(7, D), torch.randint(7, (B, T))),
    "cells": lambda: build(nn.EmbeddingBag(7, D, mode="max"), torch.randint(7, (B, T))),
    "stored": lambda: build(nn.LayerNorm(D), torch.randn(B, T, D)),
    "tied": tied,
    "stack": lambda: build(
        Calls(lambda m, x: torch.einsum("btd,edf->betf", x, m.w), w=nn.Parameter(torch.randn(3, D, 2))),
        torch.randn(B, T, D),
    ),
    "pulled": lambda: build(nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)), torch.randn(B, T, D)),
    "one_by_one": lambda: build(
        Calls(lambda m, x: torch.cdist(x, m.w[None].expand(B, -1, -1) * 2), w=nn.Parameter(torch.randn(3, D))),
        torch.randn(B, T, D),
    ),
}


def both(form, weights):
    """Return the model and its losses in float32, and the gradients of its float64 twin."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model, losses = FORMS[form]()
    model.double()
    exact = flat(loop(losses(weights), dict(model.named_parameters())))
    model.float()
    return model, losses(weights), exact


@settings(max_examples=8, deadline=None)
@given(exponents=st.lists(st.integers(-35, 35), min_size=B, max_size=B))
@pytest.mark.parametrize("form", FORMS)
def test_norms_of_every_size(form, exponents):
    weights = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    model, losses, exact = both(form, weights)
    norms = gradrein.per_sample(losses, model).norms().double()
    torch.testing.assert_close(norms, exact.norm(dim=1), rtol=2e-3, atol=0)


@settings(max_examples=8, deadline=None)
@given(exponents=st.lists(st.integers(-30, 30), min_size=B, max_size=B), limit=st.sampled_from([1e-20, 1.0, 1e20]))
@pytest.mark.parametrize("form", FORMS)
def test_normalised_at_every_size(form, exponents, limit):
    weights = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    model, losses, exact = both(form, weights)
    ps = gradrein.per_sample(losses, model)
    ps.clip_(limit, gamma=0, divide_by=1)
    written = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    expected = (exact / exact.norm(dim=1, keepdim=True)).sum(0) * limit
    torch.testing.assert_close(written, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_cosines_of_every_size(form, size):
    model, losses, exact = both(form, torch.full((B,), size, dtype=torch.float64))
    unit = exact / exact.norm(dim=1, keepdim=True)
    ps = gradrein.per_sample(losses, model)
    mean = exact.mean(0)
    torch.testing.assert_close(ps.cosine().double(), unit @ (mean / mean.norm()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1e-170, 1e-158, 1e-150, 1e150, 1e170, 1e300])
@pytest.mark.parametrize("per_parameter", [False, True])
def test_sizes_whose_squares_are_beyond_float64(size, per_parameter):
    model = nn.Linear(D, 3)
    x = torch.randn(B, T, D)
    losses = model(x).sum((1, 2)) * size
    expected = {
        name: (g / size).flatten(1).norm(dim=1) for name, g in loop(losses, dict(model.named_parameters())).items()
    }
    found = gradrein.per_sample(losses, model).norms(per_parameter=per_parameter)
    if not per_parameter:
        found = {"all": found}
        expected = {"all": torch.stack(list(expected.values()), 1).norm(dim=1)}
    for name in expected:
        torch.testing.assert_close(found[name] / size, expected[name], rtol=1e-3 if size < 1e-310 else 1e-12, atol=0)


@pytest.mark.parametrize(("weight", "size"), [(1e-42, 1e35), (1.0, 1.0), (1e42, 1e-35)])
@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_weights_that_float32_cannot_hold(weight, size, budget):
    """They are multiplied in float64."""
    model = nn.Sequential(nn.Linear(D, 3), nn.LayerNorm(3)).float()
    losses = model(torch.randn(B, T, D, dtype=torch.float32)).pow(3).sum((1, 2)) * size
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64) * weight
    gradrein.per_sample(losses, model, memory_budget=budget).weighted_(weights)
    for p, each in zip(model.parameters(), loop(losses, dict(model.named_parameters())).values(), strict=True):
        expected = torch.tensordot(weights, each.double(), 1)
        assert (p.grad.double() - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("per_parameter", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 5])
def test_normalising_leaves_a_gradient_of_zeros_alone(per_parameter, dtype, steps):
    model = nn.Sequential(nn.Linear(D, 3), nn.LayerNorm(3)).to(dtype)
    losses = model(torch.randn(B, steps, D, dtype=dtype)).pow(3).sum((1, 2)) * torch.tensor([1, 0, 2, 3], dtype=dtype)
    expected = loop(losses, dict(model.named_parameters()))
    gradrein.per_sample(losses, model).clip_(1.0, gamma=0, per_parameter=per_parameter)
    all_norms = flat(expected).norm(dim=1)
    for name, p in model.named_parameters():
        norms = expected[name].flatten(1).norm(dim=1) if per_parameter else all_norms
        factors = torch.where(norms > 0, 1 / norms, 0) / B
        torch.testing.assert_close(p.grad, torch.tensordot(factors, expected[name], 1))


def test_a_norm_too_small_to_be_normalised_is_named():
    model = nn.Linear(D, 1)
    losses = model(torch.randn(B, D)).squeeze(1) * 1e-320
    with pytest.raises(errors.ArgumentError, match="too small to be scaled to 1.0. Pass a larger gamma"):
        gradrein.per_sample(losses, model).clip_(1.0, gamma=0)
    assert model.weight.grad is None


def test_half_precision_norms_of_one_parameter_do_not_overflow():
    model = nn.Linear(D, 1, bias=False).half()
    losses = model(torch.full((2, D), 6e4).half()).float().squeeze(1)
    found = gradrein.per_sample(losses, model).norms(per_parameter=True)["weight"]
    torch.testing.assert_close(found, torch.full((2,), 6e4 * D**0.5, dtype=torch.float32), rtol=1e-2, atol=0)
