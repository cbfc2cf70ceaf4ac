"""Healthy runs of `steady.py`: nothing here swings, so a finding that says so is a false alarm. Never changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, MultiStepLR, OneCycleLR

from steady_task import Task, minibatches


def _surface(n: int, rng: torch.Generator, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=rng)
    return x, torch.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise * torch.randn(n, generator=rng)


def _blobs(n: int, rng: torch.Generator, wide: float) -> tuple[Tensor, Tensor]:
    y = torch.randint(4, (n,), generator=rng)
    corners = torch.tensor([[2.0, 0], [-2, 0], [0, 2], [0, -2]])
    return corners[y] + wide * torch.randn(n, 2, generator=rng), y


def _mlp(inputs: int, outputs: int, *extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), *extra, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def _regression(seed: int, noise: float, size: int) -> tuple[nn.Sequential, torch.Generator, object, object]:
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _mlp(4, 1)
    x, y = _surface(768, rng, noise)
    batch = minibatches(512, size, rng)

    def loss(rows: Tensor) -> Tensor:
        return ((model(x[rows]).squeeze(1) - y[rows]) ** 2).mean()

    return model, rng, lambda: loss(next(batch)), lambda: loss(torch.arange(512, 768))


def adam_regression(seed: int) -> Task:
    """Regression with Adam at its usual rate."""
    model, _, train, test = _regression(seed, 0.1, 32)
    return Task.simple(model, Adam(model.parameters(), lr=3e-3), train, test)


def noisy_regression(seed: int) -> Task:
    """Very noisy targets and batches of four at a small learning rate: the loss jumps from batch to batch."""
    model, _, train, test = _regression(seed, 1.0, 4)
    return Task.simple(model, SGD(model.parameters(), lr=0.01), train, test)


def step_schedule(seed: int) -> Task:
    """SGD with momentum whose learning rate falls tenfold twice."""
    model, _, train, test = _regression(seed, 0.1, 32)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return Task.simple(model, optimizer, train, test, after=MultiStepLR(optimizer, [100, 160]).step)


def warm_restarts(seed: int) -> Task:
    """A cosine schedule with restarts: the loss steps up a little at each, by design."""
    model, _, train, test = _regression(seed, 0.3, 32)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return Task.simple(model, optimizer, train, test, after=CosineAnnealingWarmRestarts(optimizer, 50).step)


def dropout(seed: int) -> Task:
    """Classification with dropout: the training loss is noisy, the test loss is not."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _mlp(2, 4, nn.Dropout(0.3))
    x, y = _blobs(768, rng, 1.0)
    batch = minibatches(512, 32, rng)

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(model(x[rows]), y[rows])

    optimizer = SGD(model.parameters(), lr=0.1)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(512, 768)))


def overfits(seed: int) -> Task:
    """Too few samples: the test loss turns once and rises for good. A finding of its own, not a swing."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _mlp(2, 4)
    x, y = _blobs(320, rng, 1.6)
    batch = minibatches(64, 16, rng)

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(model(x[rows]), y[rows])

    optimizer = AdamW(model.parameters(), lr=5e-3)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(64, 320)))


def curriculum(seed: int) -> Task:
    """Easy samples first, all of them after a third of the run: the loss steps up once, by design."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _mlp(4, 1)
    x, y = _surface(768, rng)
    easy = x[:512].norm(dim=1).argsort()
    taken = 0

    def loss(rows: Tensor) -> Tensor:
        return ((model(x[rows]).squeeze(1) - y[rows]) ** 2).mean()

    def train() -> Tensor:
        nonlocal taken
        taken += 1
        among = easy[:200] if taken < 70 else easy
        return loss(among[torch.randint(len(among), (32,), generator=rng)])

    return Task.simple(model, Adam(model.parameters(), lr=3e-3), train, lambda: loss(torch.arange(512, 768)))


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def lstm(seed: int) -> Task:
    """An LSTM that marks every second occurrence of a symbol, under a one-cycle schedule."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _Tagger()

    def batch(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(6, (n, 8), generator=rng)
        return x, (x == 0).cumsum(1) % 2

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x).flatten(0, 1), y.flatten())

    test = batch(128)
    optimizer = Adam(model.parameters(), lr=3e-3)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=5000)
    return Task.simple(model, optimizer, lambda: loss(*batch(16)), lambda: loss(*test), steps=150, after=schedule.step)


HEALTHY = {
    "adam_regression": adam_regression,
    "noisy_regression": noisy_regression,
    "step_schedule": step_schedule,
    "warm_restarts": warm_restarts,
    "dropout": dropout,
    "overfits": overfits,
    "curriculum": curriculum,
    "lstm": lstm,
}
