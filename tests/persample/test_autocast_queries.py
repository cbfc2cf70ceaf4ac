"""Answers that are asked for inside `torch.autocast` are those of outside: it would round our own products."""

import pytest
import torch
from torch import nn

import gradrein


def rows_that_cancel():
    """Gradients whose norms are far smaller than the products they are made of."""
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(6, 1, 64) + 0.02 * torch.randn(6, 8, 64)
    signs = torch.tensor([1.0, -1.0] * 4).view(1, 8, 1) * torch.randn(6, 1, 64)
    return layer, lambda: (layer(x) * signs).float().sum((1, 2))


def recurrent():
    layer, x = nn.LSTM(3, 5), torch.randn(4, 4, 3)
    return layer, lambda: layer(x)[0].transpose(0, 1).float().square().flatten(1).sum(1)


@pytest.mark.parametrize("case", [rows_that_cancel, recurrent], ids=lambda case: case.__name__)
@pytest.mark.parametrize("inside", ["call", "answers", "both"])
def test_the_same_as_the_loop(case, inside):
    layer, losses_of = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = losses_of()
    loop = [torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True) for loss in losses]
    expected = torch.tensor([sum(float(g.double().square().sum()) for g in grads) ** 0.5 for grads in loop])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside != "answers"):
        ps = gradrein.per_sample(losses, layer)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside != "call"):
        norms = ps.norms()
        blocks = list(ps.stream())
        assert torch.is_autocast_enabled("cpu") == (inside != "call")
    # The backward ops of the forward pass stay in bfloat16; what is made of their results does not.
    torch.testing.assert_close(norms, expected.to(norms), rtol=2e-2, atol=0)
    whole = torch.cat([block.flatten(1) for _, _, block in blocks], 1).norm(dim=1)
    torch.testing.assert_close(norms, whole, rtol=1e-4, atol=0)
