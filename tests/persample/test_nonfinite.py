"""Samples whose gradients are NaN or infinite, huge or tiny: statistics and audits say so, in every dtype."""

import dataclasses
import math

import pytest
import torch

import gradrein
from gradrein import errors

DTYPES = [torch.float32, torch.float64]


def ask(bad, dtype, at=1):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)
    x = torch.randn(4, 3, dtype=dtype)
    x[at] = bad
    return gradrein.per_sample(model(x).square().sum(1), model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_statistics_are_nan_where_a_sample_is(bad, dtype):
    found = dataclasses.asdict(ask(bad, dtype).stats())
    assert len(found) == 7
    assert all(math.isnan(value) for value in found.values()), found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_an_audit_of_what_is_not_finite_is_refused(bad, dtype, at):
    with pytest.raises(errors.NonFiniteGradientError, match=f"1 of 4 samples are NaN or infinite.*sample {at}"):
        ask(bad, dtype, at).audit()


@pytest.mark.parametrize("size", [1e-170, 1e-100, 1.0, 1e100, 1e170])
def test_statistics_and_audits_of_every_size(size):
    x = torch.randn(6, 3, dtype=torch.float64) + 1
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    ps = gradrein.per_sample(model(x).squeeze(1) * size, model)  # gradients are size * x
    found, mean = ps.stats(), x.mean(0)
    covariance = float((x - mean).square().sum()) / 5
    signal = float(mean.square().sum()) - covariance / 6
    assert found.mean_norm == pytest.approx(float(x.norm(dim=1).mean()) * size, rel=1e-12, abs=0)
    assert found.norm_of_mean == pytest.approx(float(mean.norm()) * size, rel=1e-12, abs=0)
    assert found.signal_to_noise == pytest.approx(signal / covariance, rel=1e-9)
    assert found.trace_of_covariance == pytest.approx(covariance * size * size, rel=1e-9, abs=0)
    assert ps.audit().parameters["weight"] < 1e-12


def test_a_sparse_direction_and_one_of_integers():
    model = torch.nn.Linear(3, 1, bias=False)
    ps = gradrein.per_sample(model(torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])).squeeze(1), model)
    direction = torch.tensor([[0, 2, 0]])
    for given in (direction, direction.double().to_sparse(), direction.float()):
        assert ps.dot({"weight": given}).tolist() == [4, 2]
        assert ps.cosine({"weight": given}).tolist() == pytest.approx([2 / 14**0.5, 1])


def test_statistics_of_gradients_that_are_all_zero():
    model = torch.nn.Linear(3, 1, bias=False)
    found = gradrein.per_sample(model(torch.zeros(4, 3)).squeeze(1), model).stats()
    assert (found.mean_norm, found.trace_of_covariance, found.squared_signal) == (0, 0, 0)
    assert math.isnan(found.signal_to_noise)
    assert found.noise_scale == math.inf
