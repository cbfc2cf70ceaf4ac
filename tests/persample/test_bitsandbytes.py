"""Adapters beside weights in 4 and 8 bits, which are Functions of bitsandbytes: proved through them, and exact."""

import pytest
import torch
from torch import nn

import gradrein

from .oracle import flat, loop

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: 125 MB, tested by hand")
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = {
    "nf4": lambda: bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4"),
    "fp4": lambda: bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="fp4"),
    "int8": lambda: bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False),
}


class Adapted(nn.Module):
    """Two quantised layers, each with an adapter beside it."""

    def __init__(self, weight):
        super().__init__()
        self.frozen = nn.ModuleList([WEIGHTS[weight](), WEIGHTS[weight]()]).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 64)) for _ in range(2))

    def forward(self, x):
        for frozen, adapter in zip(self.frozen, self.adapters, strict=True):
            x = (frozen(x) + adapter(x)).tanh()
        return x


@pytest.mark.parametrize("weight", WEIGHTS)
def test_adapters_of_quantised_layers(weight):
    torch.manual_seed(0)
    model, x = Adapted(weight).float().to("cpu"), torch.randn(4, 5, 64, dtype=torch.float32)
    model(x)  # 8-bit weights are quantised by now
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = loop(model(x).square().mean((1, 2)), trained)
    ps = gradrein.per_sample(model(x).square().mean((1, 2)), model)
    assert "alone" not in ps.plan()
    torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ps.grads(), expected, rtol=1e-4, atol=1e-6)
    ps.audit()
