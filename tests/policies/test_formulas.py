"""Every policy against its twin in plain Python, over a recorded sequence of norms with bad ones among them."""

import math

import pytest
import reference_impl
import torch
from cases import BOUNDS, RULES, SETTINGS, gradient, parameter, recorded

import gradrein

CASES = [(name, settings) for name, variants in SETTINGS.items() for settings in variants]


def norms_after(policy, norms, **options):
    """The norm after `clip_` of one parameter, step by step."""
    p, found = parameter(), []
    for norm in norms:
        p.grad = gradient(norm)
        gradrein.clip_([p], policy, nonfinite="propagate", **options)
        found.append(p.grad.norm().item())
    return found


def assert_same(found, expected):
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        if math.isfinite(b):
            assert a == pytest.approx(b, rel=1e-9, abs=1e-300), f"step {step}"
        else:
            assert not math.isfinite(a), f"step {step}"


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_total_norm(name, settings, bounds):
    make, twin = RULES[name]
    norms = recorded()
    policy = make(**settings, **bounds, per_parameter=False)
    assert_same(norms_after(policy, norms), twin(norms, **settings, **bounds))


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_on_a_device(name, settings, as_on_a_device):
    make, twin = RULES[name]
    norms = recorded()
    assert_same(norms_after(make(**settings, per_parameter=False), norms), twin(norms, **settings))


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_each_gradient_has_its_own_history(name, settings):
    """Three gradients, of which one is missing every third step."""
    make, twin = RULES[name]
    policy, ps = make(**settings, per_parameter=True), {key: parameter() for key in "abc"}
    histories = {key: recorded(seed=i) for i, key in enumerate("abc")}
    given, found = {key: [] for key in "abc"}, {key: [] for key in "abc"}
    for step in range(160):
        for key, p in ps.items():
            absent = key == "b" and step % 3 == 0
            p.grad = None if absent else gradient(histories[key][step])
        gradrein.clip_(ps, policy, nonfinite="propagate")
        for key, p in ps.items():
            if p.grad is not None:
                given[key].append(histories[key][step])
                found[key].append(p.grad.norm().item())
    for key in "abc":
        assert_same(found[key], twin(given[key], **settings))


@pytest.mark.parametrize(
    "settings", [{}, {"rate": 0.5, "start": 0.3, "window": 5}, {"floor": 0.3, "ceiling": 0.9}], ids=str
)
def test_overshoot(settings):
    """Two parameters that are really stepped, with momentum, down a bowl too steep for the step."""
    ps = [torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64)), parameter()]
    optimizer = torch.optim.SGD(ps, lr=0.3, momentum=0.5)
    policy, path, grads, found = gradrein.policies.ByOvershoot(**settings), [], [], []
    for step in range(300):
        ps[0].grad = 4 * ps[0].detach() + 0.1 * torch.randn(2, dtype=torch.float64)
        ps[1].grad = ps[1].detach() - 1
        if step == 30:
            ps[1].grad[0] = math.nan
        path.append(torch.cat([p.detach() for p in ps]).tolist())
        grads.append(torch.cat([p.grad for p in ps]).tolist())
        report = gradrein.clip_(ps, policy, nonfinite="skip")
        found.append(report.norm_after)
        optimizer.step()
    expected = reference_impl.overshoot(path, grads, **settings)
    assert [n for i, n in enumerate(found) if i != 30] == pytest.approx([n for i, n in enumerate(expected) if i != 30])


@pytest.mark.parametrize("settings", [{}, {"z": 3.0, "window": 16, "warmup": 5, "at_most": 2}, {"at_most": 0}], ids=str)
@pytest.mark.parametrize("with_loss", [False, True])
def test_skips(settings, with_loss):
    norms = recorded()
    norms[100:110] = [1000.0] * 10  # longer than any limit on skips
    losses = [3 + math.sin(i) for i in range(len(norms))]
    losses[60], losses[70], losses[71] = 1e6, math.nan, math.inf
    policy, p, found = gradrein.policies.SkipSpikes(**settings), parameter(), []
    for norm, loss in zip(norms, losses, strict=True):
        p.grad = gradient(norm)
        if with_loss:
            policy.see(torch.tensor(loss))
        report = gradrein.clip_([p], policy, nonfinite="propagate")
        found.append(report.skipped)
        assert not report.skipped or (p.grad == 0).all()
    expected = reference_impl.spikes(norms, losses if with_loss else None, **settings)
    assert found == expected
    assert any(expected) or settings == {"at_most": 0}


def test_skip_leaves_a_calm_step_to_the_policy():
    policy, p = gradrein.policies.SkipSpikes(gradrein.by_norm(0.5), warmup=2), parameter()
    for norm in (1.0, 1.0, 1.0):
        p.grad = gradient(norm)
        report = gradrein.clip_([p], policy)
        assert not report.skipped
        assert report.norm_after == pytest.approx(0.5)


def test_a_limit_is_not_rounded_for_float32():
    p, policy = torch.nn.Parameter(torch.zeros(1)), gradrein.policies.ByMedian(k=1.0, warmup=1)
    for size in (1e-30, 1e30, 1e-30):
        p.grad = torch.tensor([size])
        gradrein.clip_([p], policy)
    assert p.grad.item() == pytest.approx(1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_overshoot_of_other_kinds(dtype, size):
    """The way goes against the gradient, then along it: the limit moves by exp(rate) each way, but for the pull."""
    p, policy, found = torch.nn.Parameter(torch.ones(4, dtype=dtype)), gradrein.policies.ByOvershoot(1.0, 0.2), []
    g = torch.tensor([1.0, -2.0, 2.0, 4.0]).to(dtype) * size * (1j if dtype.is_complex else 1)
    for change, gradient_now in ((0.0, g), (-0.5, g), (-0.5, -g)):
        p.data.add_(change * g / size)
        p.grad = gradient_now.clone()
        found.append(gradrein.clip_([p], policy).norm_after / (5 * size))
    up = (0.2 * math.e) ** 0.995
    expected = [0.2, up, (up / math.e) ** 0.995]
    assert found == pytest.approx(expected, rel=1e-5 if dtype != torch.bfloat16 else 2e-2)


def test_by_unit_takes_a_tensor():
    grads = []
    for ratio in (0.25, torch.tensor(0.25), torch.tensor([0.25], dtype=torch.float64)):
        p = torch.nn.Parameter(torch.ones(2, 3))
        p.grad = torch.tensor([[3.0, 4.0, 0.0], [0.1, 0.0, 0.0]])
        gradrein.clip_([p], gradrein.by_unit(ratio))
        grads.append(p.grad)
    assert all(torch.equal(grads[0], g) for g in grads)
    with pytest.raises(gradrein.errors.ArgumentError, match="`ratio` must be zero or more"):
        gradrein.clip_([p], gradrein.by_unit(torch.tensor(-1.0)))
