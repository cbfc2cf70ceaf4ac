"""A model of which one part is on the host and one on the device."""

import torch
from simulated import DEVICE
from torch import nn

import gradrein


def model_and_losses():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3), nn.Linear(3, 2)
    x = torch.randn(5, 4)
    second.to(DEVICE)
    return nn.ModuleList([first, second]), second(first(x).tanh().to(DEVICE)).square().sum(1)


def test_per_sample_gradients():
    model, losses = model_and_losses()
    ps = gradrein.per_sample(losses, model)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    for i, g in enumerate(ps.grads().values()):
        torch.testing.assert_close(g.cpu(), torch.stack([row[i].cpu() for row in rows]))
    norms = torch.stack([torch.cat([g.cpu().flatten() for g in row]).norm() for row in rows])
    torch.testing.assert_close(ps.norms().cpu().float(), norms)
    ps.clip_(0.1)
    weights = (0.1 / norms).clamp(max=1) / len(norms)
    for i, p in enumerate(model.parameters()):
        assert p.grad.device == p.device
        expected = sum(w * row[i].cpu() for w, row in zip(weights, rows, strict=True))
        torch.testing.assert_close(p.grad.cpu(), expected)


def test_clipping():
    model, losses = model_and_losses()
    losses.sum().backward()
    before = torch.cat([p.grad.cpu().flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(gradrein.clip_grad_norm_(model.parameters(), 0.1).cpu(), before)
    after = torch.cat([p.grad.cpu().flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(after, torch.tensor(0.1))
    for policy in (gradrein.by_value(0.01), gradrein.by_unit(0.01), gradrein.policies.ByOvershoot()):
        gradrein.clip_(model, policy)
