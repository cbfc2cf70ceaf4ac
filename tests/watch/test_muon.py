"""Muon and AdamW under one clip: a layer with large, harmless gradients stalls all others, and is found."""

import functools

import pytest
import torch
from torch import nn

import gradrein

pytestmark = pytest.mark.needs("Muon")


class Rippled(nn.Module):
    """A network, and a ripple of a thousandth whose matrix has gradients of about 1e11."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
        self.hidden, self.ripple = nn.Linear(32, 32, bias=False), nn.Linear(8, 1, bias=False)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.head(h + self.hidden(h).tanh()) + 1e-3 * (1e14 * self.ripple(x)).sin()


@functools.cache
def trained(seed, clip):
    """Return the loss at the end over that at the start, and the findings."""
    torch.manual_seed(seed)
    model, x = Rippled(), torch.randn(64, 8)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    matrices = [model.hidden.weight, model.ripple.weight]
    others = [p for name, p in model.named_parameters() if name.startswith(("first", "head"))]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=5e-3)]
    losses = []
    with gradrein.Monitor(model) as monitor:
        for _ in range(120):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if clip == "all":
                gradrein.clip_grad_norm_(model, 1.0)
            elif clip == "AdamW":
                gradrein.clip_(optimizers[1], gradrein.by_norm(1.0))
            else:
                gradrein.clip_(model, gradrein.by_norm(1.0, per_parameter=True))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses[-1] / losses[0], [f for f in monitor.findings() if f.name == "clip_scale"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip", ["AdamW", "each"])
def test_one_clip_of_all_stalls_and_clips_apart_do_not(seed, clip):
    stalled, found = trained(seed, "all")
    learned, quiet = trained(seed, clip)
    assert stalled > 10 * learned
    assert {f.evidence["largest gradient"] for f in found} == {"ripple.weight", "not one of this optimizer"}
    assert {name for f in found for name in f.evidence["parameters"]} >= {"hidden.weight", "first.weight"}
    assert not quiet
