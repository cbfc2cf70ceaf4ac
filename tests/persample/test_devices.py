"""Tensors of our own lie where those lie that they are computed with: shown without a second device with values."""

import pytest
import torch
from torch import nn

import gradrein

from .oracle import flat, loop

B, D = 4, 3
MODELS = {
    "linear": (lambda: nn.Linear(D, D), lambda m: m(torch.randn(B, D))),
    "permuted": (lambda: nn.Linear(D, D), lambda m: m(torch.randn(B, D))[torch.tensor([2, 0, 3, 1])]),
    "windows": (lambda: nn.Linear(D, D), lambda m: m(torch.randn(B * D).unfold(0, D, D))),
    "bags": (lambda: nn.EmbeddingBag(7, D), lambda m: m(torch.randint(7, (B, 2)))),
    "convolution": (lambda: nn.Conv1d(B, 2, 2), lambda m: m(torch.randn(B, B, D))),
    "recurrent": (lambda: nn.LSTM(D, D, batch_first=True), lambda m: m(torch.randn(B, 2, D))[0]),
    "observed": (lambda: nn.Linear(D, D), lambda m: torch.special.i1(m(torch.randn(B, D)))),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_default_device_is_not_ours(name, grouped):
    make, run = MODELS[name]
    model = make()
    losses = run(model).square().flatten(1).sum(1)
    groups = torch.tensor([0, 1, 0, 1]) if grouped else None
    each = losses.view(2, 2).sum(0) if grouped else losses
    expected = flat(loop(each, dict(model.named_parameters())))
    torch.set_default_device("meta")  # as if all tensors were to lie on an accelerator
    try:
        ps = gradrein.per_sample(losses, model, sample_groups=groups)
        norms, grads, gram = ps.norms(), ps.grads(), ps.gram()
        ps.audit()
        ps.clip_(1.0)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(flat(grads), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gram, (expected @ expected.T).to(gram), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_width_have_gradients_as_their_parameters_are():
    layer, other = nn.Linear(D, 0, dtype=torch.float64), nn.Linear(D, 1, dtype=torch.float64)
    x = torch.randn(B, D, dtype=torch.float64)
    losses = layer(x).exp().sum(1) + other(x).sum(1)
    grads = gradrein.per_sample(losses, nn.ModuleList([layer, other])).grads()
    assert {(g.dtype, g.device.type) for g in grads.values()} == {(torch.float64, "cpu")}
