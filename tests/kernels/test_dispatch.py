"""A kernel for another device is one backend and one entry: nothing else has to know."""

import pytest
import torch

import gradrein
from gradrein import _kernels, _measure
from gradrein.clip import _apply


class Recorder:
    """A backend for a device without values, which notes its calls."""

    def __init__(self):
        self.calls = []

    def takes(self, tensor):
        return tensor.dim() == 1

    def takes_factor(self, factor):
        return True

    def norms(self, tensors, p):
        found = torch.empty(len(tensors), dtype=torch.float64, device="meta")
        return found if self._note("norms", tensors) else None

    def total_norm(self, tensors, p):
        return None  # a number would have to be waited for

    def scale_(self, tensors, by):
        return self._note("scale_", tensors)

    def clamp_(self, tensors, limit):
        return self._note("clamp_", tensors)

    def _note(self, name, tensors):
        if not all(map(self.takes, tensors)):
            return False
        self.calls.append((name, len(tensors)))
        return True


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setitem(_kernels.BACKENDS, "meta", found)
    return found


def parameters(*shapes, device="meta"):
    found = [torch.nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
    for p in found:
        p.grad = torch.empty_like(p)
    return found


def test_every_operation_goes_to_the_backend_of_the_device(recorder):
    ps = parameters(3, 4)
    gradrein.clip_grad_norm_(ps, 1.0)
    gradrein.clip_grad_value_(ps, 1.0)
    gradrein.clip_(ps, gradrein.by_norm(1.0), nonfinite="propagate")
    assert recorder.calls == [("norms", 2), ("scale_", 2), ("clamp_", 2), ("norms", 2), ("scale_", 2)]


def test_what_it_does_not_take_is_left_to_torch(recorder):
    gradrein.clip_grad_norm_(parameters(3, (2, 2), 4), 1.0)
    assert recorder.calls == [("norms", 2), ("scale_", 2)]
    recorder.calls.clear()
    gradrein.clip_grad_norm_(parameters(3), 1.0, foreach=False)
    assert recorder.calls == []


def test_a_device_without_a_backend(recorder, monkeypatch):
    monkeypatch.setitem(_kernels.BACKENDS, "meta", None)
    assert _kernels.native([torch.empty(1, device="meta")], None) is None
    gradrein.clip_grad_norm_(parameters(3), 1.0)
    assert recorder.calls == []


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "factor", [0.5, torch.tensor(0.5), torch.tensor([0.5, 0.25, 1.0]), torch.tensor([0.5, 0.25, 1.0]).double()], ids=str
)
def test_every_kind_of_factor(native, factor, monkeypatch):
    if not native:
        monkeypatch.setitem(_kernels.BACKENDS, "cpu", None)
    grads = [torch.randn(4, 4).t()[::2], torch.randn(5), torch.randn(3, dtype=torch.complex64)]
    each = torch.as_tensor(factor).double().expand(3).tolist()
    expected = [g * by for g, by in zip(grads, each, strict=True)]
    _apply.scale_(grads, factor)
    torch.testing.assert_close(grads, expected)
    norms = _measure.norms(grads, 2.0)
    torch.testing.assert_close(norms, torch.stack([g.abs().double().norm() for g in expected]), rtol=1e-6, atol=0)
