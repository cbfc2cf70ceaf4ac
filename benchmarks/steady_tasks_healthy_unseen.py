"""Healthy runs of `steady.py` that no finding was built on: written down first, run once at the end, never changed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from steady_task import Task, minibatches


def _start(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def logistic(seed: int) -> Task:
    """Handwritten digits by logistic regression, plain SGD, batches of sixteen."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rng = _start(seed)
    order = torch.randperm(len(data.data), generator=rng)
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    model, batch = nn.Linear(64, 10), minibatches(1397, 16, rng)

    def loss(rows: Tensor) -> Tensor:
        return cross_entropy(model(x[rows]), y[rows])

    optimizer = SGD(model.parameters(), lr=0.1)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1397, 1797)))


def normalised(seed: int) -> Task:
    """Stripes of two directions through a convolution with batch normalisation, SGD with momentum, cosine schedule."""
    rng = _start(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 2),
    )

    def batch(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(2, (n,), generator=rng)
        wave = torch.sin(1.5 * torch.arange(8) + 6 * torch.rand(n, 1, generator=rng)).unsqueeze(2).expand(n, 8, 8)
        x = torch.where(y.view(n, 1, 1) == 1, wave, wave.mT) + 1.2 * torch.randn(n, 8, 8, generator=rng)
        return x.unsqueeze(1), y

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    test = batch(256)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    after = CosineAnnealingLR(optimizer, 600).step
    return Task.simple(model, optimizer, lambda: loss(*batch(32)), lambda: loss(*test), steps=150, after=after)


def warm_transformer(seed: int) -> Task:
    """One transformer layer on a Markov chain: AdamW, a warm-up, then a slow decay."""
    rng = _start(seed)
    embed, head = nn.Embedding(6, 16), nn.Linear(16, 6)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.ModuleList([embed, layer, head])
    chain = torch.softmax(2 * torch.randn(6, 6, generator=rng), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(8)

    def batch(n: int) -> Tensor:
        found = [torch.randint(6, (n,), generator=rng)]
        while len(found) < 9:
            found.append(torch.multinomial(chain[found[-1]], 1, generator=rng).squeeze(1))
        return torch.stack(found, 1)

    def loss(x: Tensor) -> Tensor:
        hidden = layer(embed(x[:, :-1]), src_mask=mask, is_causal=True)
        return cross_entropy(head(hidden).flatten(0, 1), x[:, 1:].flatten())

    test = batch(128)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 40, math.sqrt(40 / (step + 1))))
    return Task.simple(model, optimizer, lambda: loss(batch(16)), lambda: loss(test), steps=150, after=schedule.step)


def films(seed: int) -> Task:
    """Ratings as products of two embeddings, Adagrad at its usual rate."""
    rng = _start(seed)
    users, items = nn.Embedding(40, 4), nn.Embedding(30, 4)
    for table in (users, items):
        nn.init.normal_(table.weight, std=0.3)
    model = nn.ModuleList([users, items])
    u, i = torch.randint(40, (1200,), generator=rng), torch.randint(30, (1200,), generator=rng)
    y = (torch.randn(40, 2, generator=rng)[u] * torch.randn(30, 2, generator=rng)[i]).sum(1)
    y = y + 0.3 * torch.randn(1200, generator=rng)
    batch = minibatches(1000, 50, rng)

    def loss(rows: Tensor) -> Tensor:
        return (((users(u[rows]) * items(i[rows])).sum(1) - y[rows]) ** 2).mean()

    optimizer = Adagrad(model.parameters(), lr=0.1)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1000, 1200)))


def bandit(seed: int) -> Task:
    """Policy gradients with a baseline and a small learning rate: a loss that is noise around zero. Test: regret."""
    rng = _start(seed)
    model = nn.Linear(3, 4)
    truth = torch.randn(3, 4, generator=rng)

    def train_loss() -> Tensor:
        x = torch.randn(32, 3, generator=rng)
        chances = torch.log_softmax(model(x), 1)
        action = torch.multinomial(chances.exp().detach(), 1, generator=rng)
        reward = (x @ truth).gather(1, action) + 0.3 * torch.randn(32, 1, generator=rng)
        return -((reward - reward.mean()) * chances.gather(1, action)).mean()

    held_out = torch.randn(256, 3, generator=rng)

    def test_loss() -> Tensor:
        reward = held_out @ truth
        return (reward.max(1).values - (torch.softmax(model(held_out), 1) * reward).sum(1)).mean()

    return Task.simple(model, SGD(model.parameters(), lr=0.1), train_loss, test_loss)


def pairs_cosine(seed: int) -> Task:
    """Two views of a point find each other among sixteen, at a mild temperature. RMSprop."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 6))
    mix = torch.randn(4, 10, generator=rng)

    def views(n: int) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(n, 4, generator=rng)
        left, right = (hidden @ mix + 0.4 * torch.randn(n, 10, generator=rng) for _ in range(2))
        return left, right

    def loss(left: Tensor, right: Tensor) -> Tensor:
        alike = normalize(model(left), dim=1) @ normalize(model(right), dim=1).T / 0.3
        return cross_entropy(alike, torch.arange(len(alike)))

    test = views(64)
    return Task.simple(model, RMSprop(model.parameters(), lr=1e-3), lambda: loss(*views(16)), lambda: loss(*test))


def denoiser(seed: int) -> Task:
    """Points on a ring denoised at levels drawn anew for each batch, so that losses differ by level. Adam."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        angle = 2 * math.pi * torch.rand(n, generator=rng)
        level = torch.exp(-2 + 2 * torch.rand(n, 1, generator=rng))
        return torch.stack([angle.cos(), angle.sin()], 1), level, torch.randn(n, 2, generator=rng)

    def loss(x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        return ((model(torch.cat([x + level * noise, level], 1)) - noise) ** 2).mean()

    test = batch(256)
    return Task.simple(model, Adam(model.parameters(), lr=2e-3), lambda: loss(*batch(32)), lambda: loss(*test))


def two_heads(seed: int) -> Task:
    """Two tasks of different size and an optimizer each for a body and a head, noisy targets. SGD and Adam."""
    rng = _start(seed)
    body = nn.Sequential(nn.Linear(5, 24), nn.ReLU())
    heads = nn.Linear(24, 2)
    x = torch.randn(768, 5, generator=rng)
    y = torch.stack([x[:, 0] * x[:, 1], 3 * torch.cos(x[:, 2])], 1) + 0.5 * torch.randn(768, 2, generator=rng)
    batch = minibatches(512, 16, rng)

    def loss(rows: Tensor) -> Tensor:
        return ((heads(body(x[rows])) - y[rows]) ** 2).mean()

    turns = [
        (SGD(body.parameters(), lr=0.01, momentum=0.9), lambda: loss(next(batch))),
        (Adam(heads.parameters(), lr=2e-3), lambda: loss(next(batch))),
    ]
    return Task(nn.ModuleList([body, heads]), turns, lambda: loss(torch.arange(512, 768)))


HEALTHY_UNSEEN = {
    "logistic": logistic,
    "normalised": normalised,
    "warm_transformer": warm_transformer,
    "films": films,
    "bandit": bandit,
    "pairs_cosine": pairs_cosine,
    "denoiser": denoiser,
    "two_heads": two_heads,
}
