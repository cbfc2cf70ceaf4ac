"""Functions of Liger, whose kernels Triton's interpreter runs on the CPU: proved through them, and exact."""

import importlib.util
import os

import pytest

if not (importlib.util.find_spec("triton") and importlib.util.find_spec("liger_kernel")):
    pytest.skip("triton and liger_kernel are not installed: 200 MB, tested by hand", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels choose when they are made

import numpy as np
import torch
import triton
from torch import nn
from triton.language.extra import libdevice
from triton.runtime import interpreter

import gradrein

pytestmark = pytest.mark.filterwarnings("ignore")


def _as_compiled():
    """Stand-ins for what the compiler does and the interpreter does not: floats are scalars, libdevice has bodies."""
    tl, convert = triton.language, interpreter._implicit_cvt

    def converted(given):
        if type(given) is not float:
            return convert(given)
        return tl.tensor(interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32), tl.float32)

    def unary(function):
        def run(x):
            data = function(x.handle.data).astype(x.handle.data.dtype)
            return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

        return run

    interpreter._implicit_cvt = converted
    libdevice.rsqrt, libdevice.tanh = unary(lambda a: 1 / np.sqrt(a)), unary(np.tanh)


_as_compiled()  # before Liger imports names from libdevice

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction  # noqa: E402
from liger_kernel.ops.group_norm import LigerGroupNormFunction  # noqa: E402
from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # noqa: E402
from liger_kernel.ops.softmax import LigerSoftmaxFunction  # noqa: E402
from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # noqa: E402

D = 4


@pytest.fixture(autouse=True)
def in_float32(in_float64):
    """The kernels of Liger add up anything else in bfloat16."""
    torch.set_default_dtype(torch.float32)


class Between(nn.Module):
    """A Function between two layers; its weights are trained or not."""

    def __init__(self, name, trained):
        super().__init__()
        self.name, self.below, self.above = name, nn.Linear(D, D), nn.Linear(D, D)
        self.weight = nn.Parameter(torch.rand(D) + 1, requires_grad=trained)
        self.bias = nn.Parameter(torch.rand(D), requires_grad=trained)

    def forward(self, x):
        h = self.below(x)
        if self.name == "layer":
            h = LigerLayerNormFunction.apply(h, self.weight, self.bias, 1e-5)
        elif self.name == "group":
            h = LigerGroupNormFunction.apply(h.transpose(1, 2), self.weight, self.bias, D, 2, 1e-5).transpose(1, 2)
        else:
            h = LigerSoftmaxFunction.apply(h)
        return self.above(h).square().flatten(1).sum(1)


def loop(losses_of, parameters, samples):
    """One graph per sample: some of the Functions can run backward only once."""
    rows = [torch.autograd.grad(losses_of()[i], list(parameters.values())) for i in range(samples)]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(parameters)}


def check(losses_of, parameters, samples, **options):
    expected = loop(losses_of, parameters, samples)
    ps = gradrein.per_sample(losses_of(), parameters, **options)
    assert samples == 1 or "proved" in ps.plan()
    torch.testing.assert_close(ps.grads(), expected, rtol=1e-4, atol=1e-4)
    norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
    torch.testing.assert_close(ps.norms(), norms, rtol=1e-4, atol=1e-5)
    ps.audit()


@pytest.mark.parametrize(
    ("name", "trained"), [("layer", False), ("layer", True), ("group", False), ("group", True), ("softmax", False)]
)
@pytest.mark.parametrize(
    "shape", [(2, 3), (D, 2), (3, 1), (1, 3)], ids=str
)  # as many samples as features, one row each
def test_norms_and_softmax(name, shape, trained):
    torch.manual_seed(0)
    model, x = Between(name, trained), torch.randn(*shape, D)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    check(lambda: model(x), parameters, shape[0], allow_opaque=trained)


def test_a_loss_per_token():
    """Not declared: that of a mean overwrites what it saved. Each loss is differentiated alone."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(D, D), torch.randn(3, 4, D), torch.randint(D, (12,))

    def losses_of():
        logits = model(x).view(12, D)
        return LigerCrossEntropyFunction.apply(logits, y, None, -100, 0.0, 0.0, "none")[0].view(3, 4).sum(1)

    parameters = dict(model.named_parameters())
    ps = gradrein.per_sample(losses_of(), model)
    torch.testing.assert_close(ps.grads(), loop(losses_of, parameters, 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [1, 2, 3, 5])
def test_what_swiglu_overwrites_is_put_back(samples):
    torch.manual_seed(0)
    gate, up, x = nn.Linear(D, D), nn.Linear(D, D), torch.randn(samples, D)
    parameters = {"gate": gate.weight, "up": up.weight}

    def losses_of():
        return LigerSiLUMulFunction.apply(gate(x), up(x)).square().sum(1)

    losses, expected = losses_of(), loop(losses_of, parameters, samples)
    ps = gradrein.per_sample(losses, parameters)
    torch.testing.assert_close(ps.grads(), expected, rtol=1e-4, atol=1e-5)
    ps.audit()
    total = torch.autograd.grad(losses.sum(), gate.weight)[0]
    torch.testing.assert_close(total, expected["gate"].sum(0), rtol=1e-4, atol=1e-5)
