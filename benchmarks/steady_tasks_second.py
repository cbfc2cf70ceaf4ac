"""More tasks of `steady.py` that `auto` was built on: they were unseen until it was changed for what they showed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from steady_task import Task, minibatches


def outliers(seed: int, scale: float = 1.0) -> Task:
    """Regression with squared error; three in a hundred targets are off by up to thirty. SGD with momentum."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = 4 * torch.rand(768, 2, generator=rng) - 2
    clean = torch.sin(2 * x[:, 0]) * x[:, 1]
    off = (torch.rand(768, generator=rng) < 0.03) * 60 * (torch.rand(768, generator=rng) - 0.5)
    batch = minibatches(512, 32, rng)

    def train_loss() -> Tensor:
        rows = next(batch)
        return ((model(x[rows]).squeeze(1) - clean[rows] - off[rows]) ** 2).mean()

    def test_loss() -> Tensor:
        return ((model(x[512:]).squeeze(1) - clean[512:]) ** 2).mean()

    return Task.simple(model, torch.optim.SGD(model.parameters(), lr=0.03 * scale, momentum=0.9), train_loss, test_loss)


def quartic(seed: int, scale: float = 1.0) -> Task:
    """Regression with the fourth power of the error, samples weighted by an exponential draw. Plain SGD."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    x = torch.randn(640, 6, generator=rng)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs()
    weight = -torch.log(torch.rand(640, generator=rng).clamp(min=1e-6))
    batch = minibatches(512, 8, rng)

    def loss(rows: Tensor) -> Tensor:
        return (weight[rows] * (model(x[rows]).squeeze(1) - y[rows]) ** 4).mean()

    return Task.simple(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0025 * scale),
        lambda: loss(next(batch)),
        lambda: loss(torch.arange(512, 640)),
    )


class _CharRnn(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 12)
        self.rnn = nn.GRU(12, 24, batch_first=True)
        self.head = nn.Linear(24, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def _brackets(length: int, rng: torch.Generator) -> Tensor:
    """Return nested brackets of three kinds with words between them, as symbols 0 to 8."""
    text, open_ = [], []
    while len(text) < length:
        u = torch.rand((), generator=rng).item()
        if u < 0.35 and len(open_) < 5:
            open_.append(int(torch.randint(3, (), generator=rng)))
            text.append(open_[-1])
        elif u < 0.7 and open_:
            text.append(3 + open_.pop())
        else:
            text.extend([6, 7, 8] if u < 0.85 else [6, 8])
    return torch.tensor(text[:length])


def char_rnn(seed: int, scale: float = 1.0) -> Task:
    """A GRU that reads brackets letter by letter. SGD with momentum and a learning rate that is too high."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _CharRnn(9)
    text, test = _brackets(3000, rng), _brackets(20 * 10, rng).reshape(20, 10)

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def train_loss() -> Tensor:
        starts = torch.randint(len(text) - 10, (8, 1), generator=rng)
        return loss(text[starts + torch.arange(10)])

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: loss(test), steps=150)


def adam_transformer(seed: int, scale: float = 1.0) -> Task:
    """One transformer layer that adds two digits modulo seven. Adam with a learning rate that is too high."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    width = 16
    embed = nn.Embedding(9, width)
    layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    head = nn.Linear(width, 7)
    model = nn.ModuleList([embed, layer, head])
    place = torch.randn(4, width, generator=rng)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        a, b = torch.randint(7, (2, n), generator=rng)
        middle, end = torch.full((n,), 7), torch.full((n,), 8)
        return torch.stack([a, middle, b, end], 1), (a + b) % 7

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(head(layer(embed(x) + place)[:, -1]), y)

    test = batch(128)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05 * scale)
    return Task.simple(model, optimizer, lambda: loss(*batch(16)), lambda: loss(*test), steps=150)


def gan(seed: int, scale: float = 1.0) -> Task:
    """Points on a ring: generator and discriminator, an optimizer each. The test loss is the energy distance."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    make = nn.Sequential(nn.Linear(2, 24), nn.ReLU(), nn.Linear(24, 2))
    judge = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    for_judge = torch.optim.SGD(judge.parameters(), lr=0.5 * scale, momentum=0.5)
    for_make = torch.optim.SGD(make.parameters(), lr=0.5 * scale, momentum=0.5)

    def real(n: int) -> Tensor:
        angle = 2 * math.pi * torch.rand(n, generator=rng)
        return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2, generator=rng)

    def noise(n: int) -> Tensor:
        return torch.randn(n, 2, generator=rng)

    def judge_loss() -> Tensor:
        yes, no = judge(real(32)), judge(make(noise(32)).detach())
        both = torch.cat([yes, no])
        return binary_cross_entropy_with_logits(both, torch.cat([torch.ones(32, 1), torch.zeros(32, 1)]))

    def make_loss() -> Tensor:
        return binary_cross_entropy_with_logits(judge(make(noise(32))), torch.ones(32, 1))

    held_out, held_noise = real(128), noise(128)

    def test_loss() -> Tensor:
        fake = make(held_noise)
        between = torch.cdist(fake, held_out).mean()
        return 2 * between - torch.cdist(fake, fake).mean() - torch.cdist(held_out, held_out).mean()

    return Task(nn.ModuleList([judge, make]), [(for_judge, judge_loss), (for_make, make_loss)], test_loss, steps=200)


def deep_mlp(seed: int, scale: float = 1.0) -> Task:
    """Two spirals, one label in ten wrong; nine layers of ReLU without normalisation. SGD with momentum."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(2, 20), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(20, 20), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(20, 2))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    t = 1 + 5 * torch.rand(640, generator=rng)
    y = torch.randint(2, (640,), generator=rng)
    angle = t + math.pi * y
    x = torch.stack([t * angle.cos(), t * angle.sin()], 1) / 3 + 0.05 * torch.randn(640, 2, generator=rng)
    y = torch.where(torch.rand(640, generator=rng) < 0.1, 1 - y, y)
    batch = minibatches(512, 32, rng)

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(model(x[rows]), y[rows])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.15 * scale, momentum=0.9)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(512, 640)))


def edge(seed: int, scale: float = 1.0) -> Task:
    """The whole data set every step, momentum, and a learning rate past the edge of stability. A tanh net."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(448, 10, generator=rng)
    y = torch.sin(x[:, 0] + x[:, 1]) + x[:, 2] * (x[:, 3] > 0) + 0.1 * torch.randn(448, generator=rng)
    train, test = torch.arange(320), torch.arange(320, 448)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))

    def loss(rows: Tensor) -> Tensor:
        return ((model(x[rows]).squeeze(1) - y[rows]) ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 * scale, momentum=0.9)
    return Task.simple(model, optimizer, lambda: loss(train), lambda: loss(test))


def heavy_logistic(seed: int, scale: float = 1.0) -> Task:
    """Logistic regression on features with heavy tails; five labels in a hundred are wrong. Batches of eight."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Linear(10, 1)
    chi = torch.stack([torch.randn(1024, generator=rng) ** 2 for _ in range(2)]).sum(0) / 2
    x = torch.randn(1024, 10, generator=rng) / chi.sqrt().unsqueeze(1)
    y = (x @ torch.randn(10, generator=rng) > 0).float()
    wrong = torch.rand(1024, generator=rng) < 0.05
    y = torch.where(wrong, 1 - y, y)
    batch = minibatches(768, 8, rng)

    def loss(rows: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(model(x[rows]).squeeze(1), y[rows])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 * scale, momentum=0.5, nesterov=True)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(768, 1024)))


def autoencoder(seed: int, scale: float = 1.0) -> Task:
    """Signals of very different loudness through a narrow middle. SGD with momentum and weight decay."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 24)
    )
    basis = torch.randn(4, 24, generator=rng) / 2
    loud = torch.exp(torch.randn(640, 1, generator=rng))
    x = loud * (torch.randn(640, 4, generator=rng) @ basis)
    batch = minibatches(512, 16, rng)

    def loss(rows: Tensor) -> Tensor:
        return ((model(x[rows]) - x[rows]) ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9, weight_decay=1e-3)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(512, 640)))


def pairs(seed: int, scale: float = 1.0) -> Task:
    """Two views of a digit shall meet and two digits shall part: a squared hinge on distances, SGD with momentum."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x, y = torch.tensor(data.data, dtype=torch.float32) / 4, torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))

    def loss(left: Tensor, right: Tensor) -> Tensor:
        distance = (model(x[left]) - model(x[right])).pow(2).sum(1)
        same = (y[left] == y[right]).float()
        return (same * distance + 4 * (1 - same) * (4 - distance).clamp(min=0) ** 2).mean()

    def train_loss() -> Tensor:
        left, right = torch.randint(1300, (2, 24), generator=rng)
        return loss(left, right)

    test = torch.randint(1300, 1797, (2, 256), generator=rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: loss(*test))


def reinforce(seed: int, scale: float = 1.0) -> Task:
    """Policy gradients on a bandit with heavy-tailed rewards: a loss that crosses zero. Test loss: the regret."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 5))
    truth = torch.randn(4, 5, generator=rng)

    def train_loss() -> Tensor:
        x = torch.randn(16, 4, generator=rng)
        chances = torch.log_softmax(model(x), 1)
        action = torch.multinomial(chances.exp().detach(), 1, generator=rng)
        noise = 0.3 * torch.tan(math.pi * (torch.rand(16, 1, generator=rng) - 0.5)).clamp(-30, 30)
        reward = (x @ truth).gather(1, action) + noise
        return -(reward * chances.gather(1, action)).mean()

    held_out = torch.randn(256, 4, generator=rng)

    def test_loss() -> Tensor:
        reward = held_out @ truth
        return (reward.max(1).values - (torch.softmax(model(held_out), 1) * reward).sum(1)).mean()

    return Task.simple(model, torch.optim.RMSprop(model.parameters(), lr=0.03 * scale), train_loss, test_loss)


def counts(seed: int, scale: float = 1.0) -> Task:
    """Counts whose rate is the exponential of a small net: the Poisson loss, plain SGD with weight decay."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(640, 5, generator=rng)
    rate = torch.exp(0.8 * x[:, 0] - 0.6 * x[:, 1] + 0.5 * x[:, 2] * x[:, 3] + 0.5).clamp(max=60)
    y = torch.poisson(rate, generator=rng)
    batch = minibatches(512, 16, rng)

    def deviance(rows: Tensor) -> Tensor:
        predicted, seen = model(x[rows]).squeeze(1), y[rows]
        known = torch.special.xlogy(seen, seen) - seen  # the loss of a prediction that is the count itself
        return (predicted.exp() - seen * predicted + known).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.08 * scale, weight_decay=1e-3)
    return Task.simple(model, optimizer, lambda: deviance(next(batch)), lambda: deviance(torch.arange(512, 640)))


SECOND = {
    "outliers": outliers,
    "quartic": quartic,
    "char_rnn": char_rnn,
    "adam_transformer": adam_transformer,
    "gan": gan,
    "deep_mlp": deep_mlp,
    "edge": edge,
    "heavy_logistic": heavy_logistic,
    "autoencoder": autoencoder,
    "pairs": pairs,
    "reinforce": reinforce,
    "counts": counts,
}
