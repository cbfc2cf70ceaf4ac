"""More tasks of `steady.py`, written down before anything was run. One of them, `recall`, learns well by itself.

Each takes a seed, and a factor for the learning rate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steady_task import Task, minibatches


def _start(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


class _Mixer(nn.Module):
    """Patches of a digit are mixed over places, then over channels."""

    def __init__(self, patches: int = 16, pixels: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(pixels, width)
        self.places = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.places(h.transpose(1, 2)).transpose(1, 2)
        return self.head((h + self.channels(h)).mean(1))


def mixer(seed: int, scale: float = 1.0) -> Task:
    """Digits in patches through a mixer without normalisation: a squared hinge over classes. SGD with momentum."""
    from sklearn.datasets import load_digits

    rng, data = _start(seed), load_digits()
    order = torch.randperm(len(data.data), generator=rng)
    pixels = torch.tensor(data.data, dtype=torch.float32)[order].view(-1, 4, 2, 4, 2) / 16
    x, y = pixels.transpose(2, 3).reshape(-1, 16, 4), torch.tensor(data.target)[order]
    model = _Mixer()

    def loss(rows: Tensor) -> Tensor:
        score = model(x[rows])
        margin = 1 + score - score.gather(1, y[rows, None])
        return (margin.relu() ** 2).sum(1).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9)
    batch = minibatches(1397, 16, rng)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1397, 1797)))


def claims(seed: int, scale: float = 1.0) -> Task:
    """Sizes of insurance claims, with a heavy tail: squared error of an exponential. Plain SGD. Test: of the logs."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    truth = torch.randn(6, generator=rng) / 2

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(n, 6, generator=rng)
        noise = 0.7 * torch.randn(n, generator=rng)
        return x, (x @ truth + noise).exp(), x @ truth

    def train_loss() -> Tensor:
        x, y, _ = batch(16)
        return ((model(x).squeeze(1).exp() - y) ** 2).mean()

    x_test, _, log_test = batch(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03 * scale)
    return Task.simple(
        model, optimizer, train_loss, lambda: ((model(x_test).squeeze(1) - log_test) ** 2).mean(), steps=300
    )


def recall(seed: int, scale: float = 1.0) -> Task:
    """A GRU repeats the symbol it saw first, after nine others. RMSprop, too fast."""
    rng = _start(seed)
    embed, rnn, head = nn.Embedding(6, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 6)
    model = nn.ModuleList([embed, rnn, head])

    def loss(x: Tensor) -> Tensor:
        return cross_entropy(head(rnn(embed(x))[0][:, -1]), x[:, 0])

    test = torch.randint(6, (128, 10), generator=rng)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.02 * scale)
    return Task.simple(
        model, optimizer, lambda: loss(torch.randint(6, (16, 10), generator=rng)), lambda: loss(test), steps=200
    )


class _Sine(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, speed: float) -> None:
        super().__init__()
        self.line, self.speed = nn.Linear(fan_in, fan_out), speed
        nn.init.uniform_(self.line.weight, -math.sqrt(6 / fan_in) / speed, math.sqrt(6 / fan_in) / speed)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.speed * self.line(x))


def sines(seed: int, scale: float = 1.0) -> Task:
    """A net of sines fits a chirp from its values and its slope, the slope weighing more. Adam, too fast."""
    rng = _start(seed)
    model = nn.Sequential(_Sine(1, 32, 10.0), _Sine(32, 32, 10.0), nn.Linear(32, 1))

    def wave(t: Tensor) -> Tensor:
        return torch.sin(4 * t + 6 * t**2)

    def train_loss() -> Tensor:
        t = (2 * torch.rand(32, 1, generator=rng) - 1).requires_grad_()
        out = model(t)
        slope = torch.autograd.grad(out.sum(), t, create_graph=True)[0]
        truth = (4 + 12 * t) * torch.cos(4 * t + 6 * t**2)
        return ((out - wave(t)) ** 2 + 0.1 * (slope - truth) ** 2).mean()

    grid = torch.linspace(-1, 1, 200)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * scale)
    return Task.simple(model, optimizer, train_loss, lambda: ((model(grid) - wave(grid)) ** 2).mean())


def mixture(seed: int, scale: float = 1.0) -> Task:
    """A mixture of three normals for an arc: the likelihood crosses zero. NAdam. Test: error of the mean."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 9))

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, middle, spread = model(x).chunk(3, 1)
        return weight.log_softmax(1), middle, spread

    def train_loss() -> Tensor:
        x = 2 * torch.rand(32, 1, generator=rng) - 1
        noise = torch.where(torch.rand(32, 1, generator=rng) < 0.05, 1.0, 0.02)
        y = torch.sin(3 * x) + noise * torch.randn(32, 1, generator=rng)
        weight, middle, spread = parts(x)
        return -(weight - spread - 0.5 * ((y - middle) / spread.exp()) ** 2).logsumexp(1).mean()

    grid = torch.linspace(-1, 1, 200)[:, None]

    def test_loss() -> Tensor:
        weight, middle, _ = parts(grid)
        return (((weight.exp() * middle).sum(1, keepdim=True) - torch.sin(3 * grid)) ** 2).mean()

    optimizer = torch.optim.NAdam(model.parameters(), lr=0.03 * scale)
    return Task.simple(model, optimizer, train_loss, test_loss)


def bursts(seed: int, scale: float = 1.0) -> Task:
    """The pitch of a signal by a convolution over time; one batch in twenty is far too loud. SGD with momentum."""
    rng = _start(seed)
    model = nn.Sequential(
        nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 32, 1),
    )  # fmt: skip
    time = torch.arange(32) / 32

    def batch(n: int, loud: float) -> tuple[Tensor, Tensor]:
        pitch = 1 + 3 * torch.rand(n, 1, generator=rng)
        phase = 2 * math.pi * torch.rand(n, 1, generator=rng)
        wave = torch.sin(2 * math.pi * pitch * time + phase) + 0.1 * torch.randn(n, 32, generator=rng)
        return loud * wave[:, None], pitch.squeeze(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ((model(x).squeeze(1) - y) ** 2).mean()

    test = batch(256, 1.0)

    def train_loss() -> Tensor:
        loud = 20.0 if torch.rand((), generator=rng) < 0.05 else 1.0
        return loss(*batch(16, loud))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: loss(*test))


def sensing(seed: int, scale: float = 1.0) -> Task:
    """A matrix of rank three from random measurements, as a product, the error cubed. SGD, a cosine schedule."""
    rng = _start(seed)
    left, right = nn.Parameter(0.5 * torch.randn(12, 3)), nn.Parameter(0.5 * torch.randn(3, 12))
    model = nn.ParameterList([left, right])
    truth = torch.randn(12, 3, generator=rng) @ torch.randn(3, 12, generator=rng) / 2

    def train_loss() -> Tensor:
        probe = torch.randn(16, 12, 12, generator=rng) / 4
        error = (probe * (left @ right - truth)).sum((1, 2)) + 0.05 * torch.randn(16, generator=rng)
        return (error.abs() ** 3).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000, eta_min=0.002 * scale)
    return Task.simple(
        model, optimizer, train_loss, lambda: ((left @ right - truth) ** 2).mean(), steps=250, after=schedule.step
    )


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


def residual(seed: int, scale: float = 1.0) -> Task:
    """Six residual blocks without normalisation on a rough function; noise with a heavy tail. Nesterov, decay."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(4, 24), *[_Residual(24) for _ in range(6)], nn.Linear(24, 1))

    def truth(x: Tensor) -> Tensor:
        return torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2].abs()

    def train_loss() -> Tensor:
        x = torch.randn(16, 4, generator=rng)
        noise = 0.1 * torch.randn(16, generator=rng) / torch.rand(16, generator=rng).clamp(min=0.01)
        return ((model(x).squeeze(1) - truth(x) - noise) ** 2).mean()

    held_out = torch.randn(256, 4, generator=rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005 * scale, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return Task.simple(
        model, optimizer, train_loss, lambda: ((model(held_out).squeeze(1) - truth(held_out)) ** 2).mean()
    )


MORE_TASKS = {
    "mixer": mixer,
    "claims": claims,
    "recall": recall,
    "sines": sines,
    "mixture": mixture,
    "bursts": bursts,
    "sensing": sensing,
    "residual": residual,
}
