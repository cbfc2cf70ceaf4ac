"""A small task, and what a step of it is, sample by sample."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradrein import private

N = 40


def data(samples=N, width=5):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, width, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator), torch.arange(samples))


def mlp(width=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))


def losses_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def make(model=None, dataset=None, batch_size=8, lr=0.5, loader=None, optimizer=None, **options):
    model = mlp() if model is None else model
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    loader = loader if loader is not None else DataLoader(data() if dataset is None else dataset, batch_size=batch_size)
    defaults = {"max_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "seed": 0, "accountant": "rdp"}
    if "epsilon" in options or options.get("secure"):
        defaults.pop("noise_multiplier" if "epsilon" in options else "seed")
    return private.Private(model, optimizer, loader, **{**defaults, **options})


def train(run, epochs=1, steps=None, seen=None):
    """Train, up to so many steps; write down which samples each step has seen."""
    for _ in range(epochs):
        ids = []
        for x, y, number in run.loader:
            ids += number.tolist()[: run._open[0]]
            if run.step(losses_of(run.model, x, y)):
                if seen is not None:
                    seen.append(sorted(ids))
                ids = []
                if run.steps == steps:
                    return run
    return run


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def clipped_sum(model, x, y, max_norm):
    """The obvious loop: one backward pass for each sample."""
    total = torch.zeros_like(flat(model))
    for i in range(len(x)):
        grads = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        one = torch.cat([g.flatten() for g in grads])
        total += one * min(1.0, max_norm / float(one.norm()))
    return total
