"""Norms, factors and weights of every size, whichever way they are computed."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.persample.queries.sums import BatchGrads
from gradrein.persample.representations import numerics
from gradrein.persample.representations.base import Dense, Outer


def same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 300, 1 << 20])
def test_norms_and_sums_of_what_is_written_down_side_by_side(size, dtype, budget):
    left, right = torch.randn(4, 1, 3) * size, torch.randn(4, 1, 5)
    left[1] = 0
    forms = {"weight": Outer(left.to(dtype), right.to(dtype)), "bias": Dense(left[:, 0].to(dtype))}
    parameters = {"weight": torch.empty(3, 5, dtype=dtype), "bias": torch.empty(3, dtype=dtype)}
    grads, weights = BatchGrads(dict(forms), 4, parameters, budget), torch.rand(4)
    total, sums = grads.norms(), grads.weighted_sums(weights)
    assert sum(held.strategy == "stored" for held in grads.by_name.values()) == (2 if budget else 1)
    for name, form in forms.items():
        written = form.dense().double()
        same(grads.norms_of_each[name], written.flatten(1).norm(dim=1), rtol=1e-6, atol=0)
        same(sums[name].double(), torch.tensordot(weights.double(), written, 1), rtol=1e-5, atol=1e-6 * size)
    same(total, torch.stack([*grads.norms_of_each.values()]).norm(dim=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [4096, 4097, 3 * 4096, 2**20 + 5, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_long_rows_are_as_right_as_short_ones(width, dtype):
    """torch adds up squares in float32: of four million numbers the norm would be too small by 1e-4."""
    block = torch.randn(2, width, dtype=dtype)
    for rows in (block, block[:, ::2], block.T.contiguous().T):
        expected = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(dtype, torch.float64))
        torch.testing.assert_close(numerics.row_norms(rows), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("samples", [256, 257, 1000, 100_000])
def test_sums_over_many_samples_are_as_right_as_those_of_torch(samples):
    """A product of matrices adds up in float32: of a hundred thousand equal numbers it loses four digits."""
    model = nn.Linear(2, 3)
    x = torch.rand(samples, 2) + 0.5
    gradrein.per_sample(model(x).sum(1), model).weighted_(torch.full((samples,), 0.1))
    torch.testing.assert_close(model.bias.grad, torch.full((3,), 0.1 * samples), rtol=4e-6, atol=0)


@pytest.mark.parametrize("count", [255, 256, 257, 3000, 1_000_000])
def test_inner_products_of_long_rows(count):
    """Of a vector of equal numbers, all cosines are one."""
    weight = nn.Parameter(torch.zeros(count))
    scale = torch.tensor([0.7, 0.2, 0.1])
    ps = gradrein.per_sample((scale[:, None] * weight).sum(1), {"weight": weight})
    torch.testing.assert_close(ps.cosine(), torch.ones(3), rtol=4e-6, atol=0)
    expected = (scale[:, None] * scale).double() * count
    torch.testing.assert_close(ps.gram().double(), expected, rtol=4e-6, atol=0)
    torch.testing.assert_close(
        ps.dot({"weight": torch.full((count,), 0.3)}).double(), 0.3 * scale.double() * count, rtol=4e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_of_a_bias_are_added_up_in_float32(dtype):
    """Also where their sum is beyond float16."""
    model, size = nn.Linear(1, 1).to(dtype), 1000.0
    weights = (torch.rand(2, 300, 1) * size).to(dtype)
    losses = (model(torch.zeros(2, 300, 1, dtype=dtype)).float() * weights.float()).flatten(1).sum(1)
    found = gradrein.per_sample(losses, model).norms(per_parameter=True)["bias"]
    torch.testing.assert_close(found.double(), weights.double().sum((1, 2)), rtol=1e-6, atol=0)


def test_a_sample_of_many_parameters_is_clipped_to_the_limit():
    """Gradients that are written down: four million numbers for each sample."""
    model = torch.nn.Linear(2048, 2048, bias=False)
    ps = gradrein.per_sample(model(torch.randn(2, 4096, 2048)).square().mean((1, 2)), model)
    ps.clip_(1e-4)
    written = [g.double().norm() for g in ps.grads()["weight"]]
    torch.testing.assert_close(ps.norms().double(), torch.stack(written), rtol=1e-6, atol=0)


def test_losses_may_be_changed_in_place_afterwards():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    losses = model(x).square().sum(1)
    ps = gradrein.per_sample(losses, model)
    losses.mul_(5)
    ps.audit()
    same(ps.norms(), gradrein.per_sample(model(x).square().sum(1), model).norms())
