"""The way of an accelerator on CPU tensors, compiled steps, threads; counts and reads are in tests/devices."""

import math
import shutil

import pytest
import torch

import gradrein


def model():
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
    m(torch.randn(8, 6)).pow(2).sum().backward()
    return m


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_senseless_tensor_threshold_on_a_device_spoils_nothing(limit, as_on_a_device):
    m = model()
    gradrein.clip_(m, gradrein.by_norm(torch.tensor(limit)), nonfinite="skip")
    assert all(p.grad.isfinite().all() for p in m.parameters())


def test_meta_tensors_go_through():
    p = torch.nn.Parameter(torch.empty(3, device="meta"))
    p.grad = torch.empty(3, device="meta")
    assert gradrein.clip_grad_norm_([p], 1.0).device.type == "meta"
    gradrein.clip_grad_value_([p], 1.0)


def sgd(params, clip):
    found = clip(params)
    with torch.no_grad():
        for p in params:
            p.sub_(p.grad, alpha=0.1)
    return found


COMPILED = {
    "norm": lambda params: gradrein.clip_grad_norm_(params, 0.1),
    "norm 3": lambda params: gradrein.clip_grad_norm_(params, 0.1, 3),
    "norm inf": lambda params: gradrein.clip_grad_norm_(params, 0.1, "inf"),
    "value": lambda params: gradrein.clip_grad_value_(params, 0.1),
    "clip_": lambda params: gradrein.clip_(params, gradrein.by_norm(0.1), nonfinite="skip") and None,
}


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.needs("compiler that traces context managers")
def test_a_compiled_step_has_no_graph_break(name, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch's inductor needs a C++ compiler")
    if backend == "inductor" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch's inductor writes C++ that does not compile without vector instructions (at::vec)")
    torch._dynamo.reset()
    compiled, plain = list(model().parameters()), list(model().parameters())
    found = torch.compile(sgd, backend=backend, fullgraph=True)(compiled, COMPILED[name])
    expected = sgd(plain, COMPILED[name])
    if expected is not None:
        torch.testing.assert_close(found, expected)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_norm_beyond_float32_is_not_lost(foreach, as_on_a_device):
    """Every gradient is a float32, and their norm is none: the factor is computed in float64."""
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3e38, 3e38])
    gradrein.clip_grad_norm_([p], 1.0, foreach=foreach)
    expected = torch.full((2,), math.sqrt(0.5))
    torch.testing.assert_close(p.grad, expected)
    (clipped,), _ = gradrein.clip_by_global_norm([torch.tensor([3e38, 3e38])], 1.0)
    torch.testing.assert_close(clipped, expected)
    (clipped,), _ = gradrein.clip_by_global_norm([torch.tensor([3e38, 3e38])], 1.0, use_norm=3e38 * math.sqrt(2))
    torch.testing.assert_close(clipped, expected)
