"""The three tasks of `steady.py`: each makes a model, an optimizer, a loss for a step and a test loss, from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Task:
    """One run to be.

    Attributes:
        model: what is trained.
        optimizer: with the settings that make it swing.
        step_loss: the loss of a fresh batch.
        test_loss: the loss on held-out data, a number.
        steps: how many steps a run has.
        every: how many steps between two looks at the test loss.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step_loss: Callable[[], Tensor]
    test_loss: Callable[[], float]
    steps: int
    every: int


def powered(seed: int) -> Task:
    """Handwritten digits (bundled with scikit-learn): cross-entropy weighted by class, to the third power."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    weights = torch.linspace(0.5, 2.0, 10)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=rng)
    train, test = order[:1300], order[1300:]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)

    def loss(rows: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none")
        return (weights[y[rows]] * each**3).mean()

    def step_loss() -> Tensor:
        return loss(train[torch.randint(len(train), (16,), generator=rng)])

    def test_loss() -> float:
        with torch.no_grad():
            return loss(test).item()

    return Task(model, optimizer, step_loss, test_loss, 300, 6)


class _Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, 1.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1]).squeeze(1)


def recurrent(seed: int) -> Task:
    """A plain RNN that keeps a fading sum of its inputs; the targets it learns from have heavy-tailed noise."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _Rnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    length = 20

    fading = 0.8 ** torch.arange(length - 1, -1, -1)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, length, 1, generator=rng)
        return x, x.squeeze(2) @ fading

    test = batch(256)

    def step_loss() -> Tensor:
        x, y = batch(32)
        uniform = torch.rand(32, generator=rng) - 0.5
        noise = 0.1 * torch.tan(math.pi * uniform).clamp(-100, 100)  # Cauchy, cut off
        return ((model(x) - y - noise) ** 2).mean()

    def test_loss() -> float:
        with torch.no_grad():
            return ((model(test[0]) - test[1]) ** 2).mean().item()

    return Task(model, optimizer, step_loss, test_loss, 300, 6)


class _Transformer(nn.Module):
    def __init__(self, symbols: int, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.place, mask=self.mask, is_causal=True))


def transformer(seed: int, lr: float = 1.0) -> Task:
    """A small transformer on a second-order Markov chain, with a learning rate that is too high."""
    symbols, length = 12, 24
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _Transformer(symbols, 32, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    chain = torch.softmax(3 * torch.randn(symbols, symbols, symbols, generator=rng), 2)

    def batch(n: int) -> Tensor:
        found = [torch.randint(symbols, (n,), generator=rng) for _ in range(2)]
        while len(found) < length + 1:
            found.append(torch.multinomial(chain[found[-2], found[-1]], 1, generator=rng).squeeze(1))
        return torch.stack(found, 1)

    pool, test = batch(2048), batch(96)

    def loss(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def step_loss() -> Tensor:
        return loss(pool[torch.randint(len(pool), (16,), generator=rng)])

    def test_loss() -> float:
        with torch.no_grad():
            return loss(test).item()

    return Task(model, optimizer, step_loss, test_loss, 150, 5)


def calm(seed: int) -> Task:
    """The same transformer with a learning rate that suits it: what holding costs where nothing swings."""
    return transformer(seed, lr=0.3)


TASKS = {"powered": powered, "recurrent": recurrent, "transformer": transformer, "calm": calm}
