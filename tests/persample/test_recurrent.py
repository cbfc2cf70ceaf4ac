"""Recurrent layers in float32, where LSTM is one fused op on CPU, and linear layers without width."""

import pytest
import torch
from torch import nn

import gradrein

from .oracle import flat, loop

B, T, D = 4, 5, 3


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"bias": False, "bidirectional": True},
        {"bias": False, "num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False, "proj_size": 2},
        {"bias": False, "num_layers": 2, "dropout": 0.5},
        {"bidirectional": True, "proj_size": 2, "batch_first": True},
    ],
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, options, dtype):
    if "proj_size" in options and kind is not nn.LSTM:
        pytest.skip("only LSTM has projections")
    layer = kind(D, 4, **options).to(dtype)
    x = torch.randn(B, T, D, dtype=dtype)
    for retain_graph in (True, False):
        out = layer(x if layer.batch_first else x.transpose(0, 1))[0]
        losses = out.square().sum((1, 2) if layer.batch_first else (0, 2))
        expected = loop(losses, dict(layer.named_parameters()))
        ps = gradrein.per_sample(losses, layer, retain_graph=retain_graph)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(flat(ps.grads()), flat(expected), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("d_in", "d_out"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("shape", [(B,), (B, T)])
@pytest.mark.parametrize("retain_graph", [True, False])
def test_layers_without_width(d_in, d_out, shape, retain_graph):
    layer, other = nn.Linear(d_in, d_out), nn.Linear(2, 2)
    losses = layer(torch.randn(*shape, d_in)).flatten(1).exp().sum(1) + other(torch.randn(B, 2)).square().sum(1)
    model = nn.ModuleList([layer, other])
    expected = loop(losses, dict(model.named_parameters()))
    ps = gradrein.per_sample(losses, model, retain_graph=retain_graph)
    torch.testing.assert_close(ps.grads(), expected)
    torch.testing.assert_close(ps.norms(), torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1))
    ps.clip_(1.0)
    assert layer.weight.grad.shape == layer.weight.shape
