"""Tasks of `steady.py` that `auto` was built on. Each takes a seed, and a factor for the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steady_task import Task, minibatches


def _digits(seed: int) -> tuple[torch.Generator, Tensor, Tensor]:
    """Handwritten digits, bundled with scikit-learn, in an order of this seed; the last 400 are for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    order = torch.randperm(len(data.data), generator=rng)
    return rng, torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]


def powered(seed: int, scale: float = 1.0) -> Task:
    """Digits: cross-entropy weighted by class, to the third power. SGD with momentum."""
    rng, x, y = _digits(seed)
    weights = torch.linspace(0.5, 2.0, 10)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(rows: Tensor) -> Tensor:
        each = cross_entropy(model(x[rows]), y[rows], reduction="none")
        return (weights[y[rows]] * each**3).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.005 * scale, momentum=0.9)
    batch = minibatches(1397, 16, rng)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1397, 1797)))


def decayed(seed: int, scale: float = 1.0) -> Task:
    """Digits: weighted cross-entropy squared, a deeper net, SGD with momentum and weight decay."""
    rng, x, y = _digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(rows: Tensor) -> Tensor:
        weight = 1 + 4.0 * (y[rows] >= 8)
        return (weight * cross_entropy(model(x[rows]), y[rows], reduction="none") ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.025 * scale, momentum=0.9, weight_decay=1e-3)
    batch = minibatches(1297, 32, rng)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1397, 1797)), steps=300)


class _Rnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(1, 32, batch_first=True)
        self.head = nn.Linear(32, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, 1.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1]).squeeze(1)


def recurrent(seed: int, scale: float = 1.0) -> Task:
    """A plain RNN that keeps a fading sum of its inputs; the targets it learns from have heavy-tailed noise."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _Rnn()
    length = 12
    fading = 0.8 ** torch.arange(length - 1, -1, -1)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, length, 1, generator=rng)
        return x, x.squeeze(2) @ fading

    test = batch(256)

    def train_loss() -> Tensor:
        x, y = batch(32)
        noise = 0.1 * torch.tan(math.pi * (torch.rand(32, generator=rng) - 0.5)).clamp(-100, 100)  # Cauchy, cut off
        return ((model(x) - y - noise) ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: ((model(test[0]) - test[1]) ** 2).mean())


class _Transformer(nn.Module):
    def __init__(self, symbols: int, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, symbols)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x) + self.place, src_mask=self.mask, is_causal=True))


def transformer(seed: int, scale: float = 1.0) -> Task:
    """A small transformer on a second-order Markov chain. SGD with momentum and a learning rate that is too high."""
    symbols, length = 8, 12
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _Transformer(symbols, 16, length)
    chain = torch.softmax(3 * torch.randn(symbols, symbols, symbols, generator=rng), 2)

    def batch(n: int) -> Tensor:
        found = [torch.randint(symbols, (n,), generator=rng) for _ in range(2)]
        while len(found) < length + 1:
            found.append(torch.multinomial(chain[found[-2], found[-1]], 1, generator=rng).squeeze(1))
        return torch.stack(found, 1)

    pool, test = batch(1024), batch(64)

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 * scale, momentum=0.9)
    batches = minibatches(1024, 16, rng)
    return Task.simple(model, optimizer, lambda: loss(pool[next(batches)]), lambda: loss(test), steps=150)


def cubed(seed: int, scale: float = 1.0) -> Task:
    """Regression: the third power of the error, a tenth of the samples weighing tenfold. SGD with momentum."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(640, 5, generator=rng)
    y = x[:, 0] ** 2 - x[:, 1] * x[:, 2] + 0.3 * torch.randn(640, generator=rng)
    weight = 1 + 9.0 * (torch.rand(640, generator=rng) < 0.1)
    batch = minibatches(512, 16, rng)

    def loss(rows: Tensor) -> Tensor:
        return (weight[rows] * (model(x[rows]).squeeze(1) - y[rows]).abs() ** 3).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0008 * scale, momentum=0.9)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(512, 640)))


def _surface(seed: int, width: int = 32) -> tuple[torch.Generator, nn.Module, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(768, 3, generator=rng)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(768, generator=rng)
    return rng, nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)), x, y


def corrupt(seed: int, scale: float = 1.0) -> Task:
    """Regression in which fifteen batches in a hundred hold rows that are scaled up by eight. SGD with momentum."""
    rng, model, x, y = _surface(seed)
    batch = minibatches(512, 16, rng)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return ((model(inputs).squeeze(1) - targets) ** 2).mean()

    def train_loss() -> Tensor:
        rows = next(batch)
        by = torch.ones(16)
        if torch.rand((), generator=rng) < 0.15:
            by[:4] = 8.0
        return loss(by.unsqueeze(1) * x[rows], by * y[rows])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: loss(x[512:], y[512:]))


def rare(seed: int, scale: float = 1.0) -> Task:
    """Regression in which one batch in fifty has targets that are a hundred times too large. SGD with momentum."""
    rng, model, x, y = _surface(seed)
    batch = minibatches(512, 16, rng)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return ((model(inputs).squeeze(1) - targets) ** 2).mean()

    def train_loss() -> Tensor:
        rows = next(batch)
        by = 100.0 if torch.rand((), generator=rng) < 0.02 else 1.0
        return loss(x[rows], by * y[rows])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: loss(x[512:], y[512:]))


def full_batch(seed: int, scale: float = 1.0) -> Task:
    """Every step on all of the data, plain descent at the edge of stability."""
    _, model, x, y = _surface(seed)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return ((model(inputs).squeeze(1) - targets) ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.35 * scale)
    return Task.simple(model, optimizer, lambda: loss(x[:384], y[:384]), lambda: loss(x[512:], y[512:]))


def physics(seed: int, scale: float = 1.0) -> Task:
    """A net that solves u' = -5 u + 5 sin(6 t) from the equation, its start weighted by twenty. SGD with momentum."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    eps = 1e-2

    def loss(t: Tensor) -> Tensor:
        u, ahead, behind, start = model(torch.cat([t, t + eps, t - eps, torch.zeros(1, 1)])).split([*[len(t)] * 3, 1])
        residual = (ahead - behind) / (2 * eps) + 5 * u - 5 * torch.sin(6 * t)
        return (residual**2).mean() + 20 * ((start - 1) ** 2).sum()

    grid = torch.linspace(0, 1, 128).unsqueeze(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.006 * scale, momentum=0.9)
    return Task.simple(model, optimizer, lambda: loss(torch.rand(24, 1, generator=rng)), lambda: loss(grid))


def cnn_adam(seed: int, scale: float = 1.0) -> Task:
    """Digits through a small convolution, weighted cross-entropy squared. Adam, too fast."""
    rng, x, y = _digits(seed)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 10))

    def loss(rows: Tensor) -> Tensor:
        weight = 1 + 4.0 * (y[rows] >= 8)
        logits = model(x[rows].unflatten(1, (1, 8, 8)))
        return (weight * cross_entropy(logits, y[rows], reduction="none") ** 2).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05 * scale)
    batch = minibatches(1397, 16, rng)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1397, 1797)), steps=150)


def density(seed: int, scale: float = 1.0) -> Task:
    """Mean and variance by their likelihood, which crosses zero. The test loss is the divergence from the truth."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
    x = 4 * torch.rand(640, 1, generator=rng) - 2
    mean, sd = torch.sin(2 * x), 0.1 + 0.3 * (x > 0)
    y = mean + sd * torch.randn(640, 1, generator=rng)
    batch = minibatches(512, 16, rng)

    def train_loss() -> Tensor:
        rows = next(batch)
        found, log_variance = model(x[rows]).split(1, 1)
        return 0.5 * (log_variance + (found - y[rows]) ** 2 / log_variance.exp()).mean()

    def test_loss() -> Tensor:
        found, log_variance = model(x[512:]).split(1, 1)
        off = sd[512:] ** 2 + (found - mean[512:]) ** 2
        return (0.5 * (log_variance - 2 * sd[512:].log() + off / log_variance.exp() - 1)).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, test_loss)


def waves_adamw(seed: int, scale: float = 1.0) -> Task:
    """An RNN that continues a wave, one sequence in thirty being a burst. AdamW with weight decay."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _Rnn()

    def batch(n: int, bursts: float) -> tuple[Tensor, Tensor]:
        start, speed = 6 * torch.rand(n, 1, generator=rng), 0.3 + 0.5 * torch.rand(n, 1, generator=rng)
        wave = torch.sin(start + speed * torch.arange(9))
        loud = 1 + 30 * (torch.rand(n, 1, generator=rng) < bursts)
        return (wave[:, :-1]).unsqueeze(2), (loud * wave[:, -1:]).squeeze(1)

    test = batch(256, 0.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ((model(x) - y) ** 2).mean()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 * scale, weight_decay=0.05)
    return Task.simple(model, optimizer, lambda: loss(*batch(16, 1 / 30)), lambda: loss(*test), steps=150)


SEEN = {
    "powered": powered,
    "decayed": decayed,
    "recurrent": recurrent,
    "transformer": transformer,
    "cubed": cubed,
    "corrupt": corrupt,
    "rare": rare,
    "full_batch": full_batch,
    "physics": physics,
    "cnn_adam": cnn_adam,
    "density": density,
    "waves_adamw": waves_adamw,
}
