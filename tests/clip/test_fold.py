"""`fold_into`: the coefficient and the skip travel into a fused optimizer's own step."""

import copy
import math

import pytest
import torch

import gradrein
from gradrein import by_norm

ADAGRAD = pytest.param(torch.optim.Adagrad, marks=pytest.mark.needs("fused Adagrad on the CPU"))
FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, ADAGRAD]


def pair(kind, seed=0):
    torch.manual_seed(seed)
    a = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    b = copy.deepcopy(a)
    return (a, kind(a.parameters(), lr=0.1, fused=True)), (b, kind(b.parameters(), lr=0.1, fused=True))


def backward(m, step):
    torch.manual_seed(step)
    m.zero_grad()
    (m(torch.randn(6, 5)).pow(2).sum() * 10).backward()


@pytest.mark.parametrize("kind", FUSED)
def test_same_as_clipping_first(kind):
    (a, fold), (b, plain) = pair(kind)
    for step in range(4):
        for m in (a, b):
            backward(m, step)
        untouched = [p.grad.clone() for p in a.parameters()]
        report = gradrein.clip_(a, by_norm(0.5), fold_into=fold)
        assert all(torch.equal(p.grad, g) for p, g in zip(a.parameters(), untouched, strict=True))
        assert report.norm_after == pytest.approx(0.5, rel=1e-5)
        fold.step()
        gradrein.clip_(b, by_norm(0.5))
        plain.step()
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FUSED)
def test_the_next_step_is_not_touched(kind):
    (a, fold), (b, plain) = pair(kind)
    backward(a, 0), backward(b, 0)
    gradrein.clip_(a, by_norm(0.5), fold_into=fold)
    fold.step()
    gradrein.clip_(b, by_norm(0.5))
    plain.step()
    assert not hasattr(fold, "grad_scale")
    backward(a, 1), backward(b, 1)
    fold.step()
    plain.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FUSED)
def test_a_skipped_step_changes_nothing(kind):
    (a, fold), _ = pair(kind)
    backward(a, 0)
    a[0].weight.grad[0, 0] = math.nan
    kept = [p.detach().clone() for p in a.parameters()]
    report = gradrein.clip_(a, by_norm(0.5), nonfinite="skip", fold_into=fold)
    assert report.skipped
    fold.step()
    for p, k in zip(a.parameters(), kept, strict=True):
        assert torch.equal(p, k)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_with_a_grad_scaler(kind):
    (a, fold), (b, plain) = pair(kind)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for step in range(3):
        for m, scaler in zip((a, b), scalers, strict=True):
            torch.manual_seed(step)
            m.zero_grad()
            scaler.scale(m(torch.randn(6, 5)).pow(2).sum() * 10).backward()
        scalers[0].unscale_(fold)
        gradrein.clip_(a, by_norm(0.5), fold_into=fold)
        scalers[0].step(fold)
        scalers[1].unscale_(plain)
        gradrein.clip_(b, by_norm(0.5))
        scalers[1].step(plain)
        for scaler in scalers:
            scaler.update()
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    # and a step of the scaler alone afterwards, without clip_ in between
    scalers[0].scale(a(torch.randn(6, 5)).sum()).backward()
    scalers[0].step(fold)
    scalers[0].update()


def test_a_scalers_overflow_skips_the_folded_step():
    (a, fold), _ = pair(torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(a(torch.randn(6, 5)).sum()).backward()
    a[0].weight.grad[0, 0] = math.inf
    kept = [p.detach().clone() for p in a.parameters()]
    scaler.unscale_(fold)
    gradrein.clip_(a, by_norm(0.5), nonfinite="skip", fold_into=fold)
    scaler.step(fold)
    scaler.update()
    assert all(torch.equal(p, k) for p, k in zip(a.parameters(), kept, strict=True))
    assert scaler.get_scale() == 2.0**9


def test_refused_by_name():
    (a, fused), _ = pair(torch.optim.SGD)
    backward(a, 0)
    with pytest.raises(gradrein.errors.FoldError, match=r"Adam cannot apply a coefficient in its step.*fused=True"):
        gradrein.clip_(a, by_norm(1.0), fold_into=torch.optim.Adam(a.parameters(), fused=False))
    with pytest.raises(
        gradrein.errors.FoldError, match=r"exactly the parameters that SGD steps.*It steps 4; 2 of these"
    ):
        gradrein.clip_(a[0], by_norm(1.0), fold_into=fused)
    with pytest.raises(gradrein.errors.FoldError, match="one coefficient for all"):
        gradrein.clip_(a, gradrein.by_norm(1.0, per_parameter=True), fold_into=fused)
    with pytest.raises(gradrein.errors.FoldError, match="in 2 group"):
        gradrein.clip_(a, {"0.*": by_norm(1.0), "*": by_norm(2.0)}, fold_into=fused)
    assert not hasattr(fused, "grad_scale")


@pytest.mark.parametrize(("size", "limit"), [(1e38, 1e-10), (1e38, 0.0)])
def test_a_coefficient_that_no_float32_holds(size, limit):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), size)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    if limit:
        with pytest.raises(gradrein.errors.FoldError, match="no float32 holds that of"):
            gradrein.clip_([p], gradrein.by_norm(limit), fold_into=optimizer)
        assert p.grad.tolist() == torch.full((2,), size).tolist()
        assert getattr(optimizer, "grad_scale", None) is None
    else:
        gradrein.clip_([p], gradrein.by_norm(limit), fold_into=optimizer)
        optimizer.step()
        assert p.tolist() == [0, 0]
