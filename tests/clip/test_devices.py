"""No GPU here: the accelerator's path is run on CPU tensors under a mode that fails on any read of a value."""

import math
import shutil
import threading

import helpers
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradrein

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item", "aten::nonzero"}


class NoHostRead(TorchDispatchMode):
    """Fails where an accelerator would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in READS, f"{func} reads a value from the device"
        return func(*args, **(kwargs or {}))


def test_the_mode_can_fail():
    with NoHostRead(), pytest.raises(AssertionError, match="reads a value"):
        bool(torch.ones(1) > 0)


def model():
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
    m(torch.randn(8, 6)).pow(2).sum().backward()
    return m


CALLS = {
    "norm": lambda m: gradrein.clip_grad_norm_(m, 0.1),
    "norm, loop": lambda m: gradrein.clip_grad_norm_(m, 0.1, foreach=False),
    "norm 1": lambda m: gradrein.clip_grad_norm_(m, 0.1, 1),
    "norm 3": lambda m: gradrein.clip_grad_norm_(m, 0.1, 3),
    "norm inf": lambda m: gradrein.clip_grad_norm_(m, 0.1, "inf"),
    "tensor threshold": lambda m: gradrein.clip_grad_norm_(m, torch.tensor(0.1)),
    "value": lambda m: gradrein.clip_grad_value_(m, 0.1),
    "tensor value": lambda m: gradrein.clip_grad_value_(m, torch.tensor(0.1)),
    "halves": lambda m: gradrein.clip_grads_with_norm_(
        m, 0.1, gradrein.get_total_norm([p.grad for p in m.parameters()])
    ),
    "global": lambda m: gradrein.clip_by_global_norm([p.grad for p in m.parameters()], 0.1),
    "by_norm": lambda m: gradrein.clip_(m, gradrein.by_norm(0.1), nonfinite="skip"),
    "by_norm tensor": lambda m: gradrein.clip_(m, gradrein.by_norm(torch.tensor(0.1)), nonfinite="zero"),
    "by_value": lambda m: gradrein.clip_(m, gradrein.by_value(0.1), nonfinite="propagate"),
    "by_value tensor": lambda m: gradrein.clip_(m, gradrein.by_value(torch.tensor(0.1)), nonfinite="skip"),
    "by_norm, per parameter": lambda m: gradrein.clip_(m, gradrein.by_norm(0.1, per_parameter=True), nonfinite="skip"),
    "by_rms": lambda m: gradrein.clip_(m, gradrein.by_rms(0.1), nonfinite="skip"),
    "by_unit": lambda m: gradrein.clip_(m, gradrein.by_unit(0.1), nonfinite="skip"),
    "patterns": lambda m: gradrein.clip_(m, {"0.*": gradrein.by_norm(0.1), "*": None}, nonfinite="skip"),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_value_is_read_and_the_numbers_are_the_same(name, as_on_a_device, monkeypatch):
    there = model()
    with NoHostRead():
        CALLS[name](there)
    monkeypatch.undo()
    here = model()
    CALLS[name](here)
    for a, b in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mode", ["skip", "zero", "propagate"])
def test_nonfinite_modes_without_a_read(bad, mode, as_on_a_device, monkeypatch):
    there = model()
    there[0].weight.grad[0, 0] = bad
    with NoHostRead():
        report = gradrein.clip_(there, gradrein.by_norm(0.1), nonfinite=mode)
    if mode != "propagate":
        assert report.offenders == {"0.weight": 1}
    monkeypatch.undo()
    here = model()
    here[0].weight.grad[0, 0] = bad
    assert report.skipped == gradrein.clip_(here, gradrein.by_norm(0.1), nonfinite=mode).skipped
    for a, b in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8, equal_nan=True)


def test_a_finite_step_is_not_skipped_on_a_device(as_on_a_device):
    m = model()
    with NoHostRead():
        report = gradrein.clip_(m, gradrein.by_norm(0.1), nonfinite="skip")
    assert not report.skipped
    assert report.norm_after == pytest.approx(0.1, rel=1e-5)
    assert report.offenders == {}


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_senseless_tensor_threshold_on_a_device_spoils_nothing(limit, as_on_a_device):
    m = model()
    gradrein.clip_(m, gradrein.by_norm(torch.tensor(limit)), nonfinite="skip")
    assert all(p.grad.isfinite().all() for p in m.parameters())


def test_extremes_without_kernels(without_kernels):
    for grad, norm in ((torch.full((4,), 1e19), 2e19), (torch.full((4,), 1e-25), 2e-25)):
        (p,) = helpers.parameters([grad])
        assert gradrein.clip_grad_norm_([p], math.inf).item() == pytest.approx(norm, rel=1e-6)


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


def test_two_threads_clip_two_models():
    models = [model() for _ in range(4)]
    start = threading.Barrier(4)
    norms = [None] * 4

    def work(i):
        start.wait()
        norms[i] = gradrein.clip_grad_norm_(models[i], 0.1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expected = model()
    total = gradrein.clip_grad_norm_(expected, 0.1)
    for m, norm in zip(models, norms, strict=True):
        assert torch.equal(norm, total)
        for a, b in zip(m.parameters(), expected.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


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
