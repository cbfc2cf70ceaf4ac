"""Tasks of `steady.py`: written down first, then run, never changed. `auto` has not been changed since.

Before that they were run without clipping only, to see that they start and that they swing. Where the loss that is
trained on says little (two nets against each other, rewards, a moving target), the test loss is a quantity that does:
the energy distance of what is generated, the cost of the control, the error of the values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from steady_task import Task, minibatches


def _start(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def adding(seed: int, scale: float = 1.0) -> Task:
    """An LSTM that adds the two marked numbers of a sequence. SGD with momentum, too fast, on the squared error."""
    rng = _start(seed)
    rnn, head = nn.LSTM(2, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])

    def batch(n: int) -> tuple[Tensor, Tensor]:
        value, mark = 4 * torch.rand(n, 8, generator=rng), torch.zeros(n, 8)
        mark.scatter_(1, torch.rand(n, 8, generator=rng).topk(2).indices, 1.0)
        return torch.stack([value, mark], 2), (value * mark).sum(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return ((head(rnn(x)[0][:, -1]).squeeze(1) - y) ** 2).mean()

    test = batch(128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 * scale, momentum=0.9)
    return Task.simple(model, optimizer, lambda: loss(*batch(16)), lambda: loss(*test), steps=150)


def gan_modes(seed: int, scale: float = 1.0) -> Task:
    """Eight clusters on a circle: a generator and a critic with a hinge loss, Adam each. Test: energy distance."""
    rng = _start(seed)
    make = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def real(n: int) -> Tensor:
        angle = torch.randint(8, (n,), generator=rng) * math.pi / 4
        return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(n, 2, generator=rng)

    def noise(n: int) -> Tensor:
        return torch.randn(n, 4, generator=rng)

    def critic_loss() -> Tensor:
        return (1 - critic(real(32))).relu().mean() + (1 + critic(make(noise(32)).detach())).relu().mean()

    held_out, held_noise = real(128), noise(128)

    def distance() -> Tensor:
        fake = make(held_noise)
        between = torch.cdist(fake, held_out).mean()
        return 2 * between - torch.cdist(fake, fake).mean() - torch.cdist(held_out, held_out).mean()

    turns = [
        (torch.optim.Adam(critic.parameters(), lr=0.02 * scale, betas=(0.5, 0.9)), critic_loss),
        (
            torch.optim.Adam(make.parameters(), lr=0.02 * scale, betas=(0.5, 0.9)),
            lambda: -critic(make(noise(32))).mean(),
        ),
    ]
    return Task(nn.ModuleList([critic, make]), turns, distance)


def control(seed: int, scale: float = 1.0) -> Task:
    """A cart on a line is brought to rest by policy gradients; a run's cost has a heavy tail. Test: the mean cost."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def play(state: Tensor, shake: float) -> tuple[Tensor, Tensor]:
        costs, chances = [], []
        for _ in range(10):
            mean = model(state).squeeze(1)
            force = mean.detach() + shake * torch.randn(len(mean), generator=rng)
            chances.append(-((force - mean) ** 2) / 2)
            place, speed = state.unbind(1)
            state = torch.stack([place + 0.3 * speed, speed + 0.3 * force], 1)
            costs.append((state**2).sum(1) + 0.1 * force**2)
        return torch.stack(costs, 1), torch.stack(chances, 1)

    def train_loss() -> Tensor:
        costs, chances = play(2 * torch.randn(16, 2, generator=rng), 1.0)
        later = costs.flip(1).cumsum(1).flip(1)
        return ((later - later.mean(0)) * chances).sum(1).mean()

    starts = 2 * torch.randn(64, 2, generator=rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: play(starts, 0.0)[0].mean(), steps=120)


def diffusion(seed: int, scale: float = 1.0) -> Task:
    """Two moons denoised: errors weighted by one over the noise variance. SGD with momentum. Test: unweighted."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(3, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))

    def moons(n: int) -> Tensor:
        angle, side = math.pi * torch.rand(n, generator=rng), 2.0 * torch.randint(2, (n,), generator=rng) - 1
        return torch.stack([angle.cos() + side / 2, side * (angle.sin() - 0.3)], 1)

    def errors(x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        found = model(torch.cat([x + level * noise, level.log()], 1))
        return ((found - x) ** 2).sum(1)

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        level = torch.exp(-3 + 3 * torch.rand(n, 1, generator=rng))
        return moons(n), level, torch.randn(n, 2, generator=rng)

    def train_loss() -> Tensor:
        x, level, noise = batch(32)
        return (errors(x, level, noise) / level.squeeze(1) ** 2).mean()

    test = batch(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003 * scale, momentum=0.9)
    return Task.simple(model, optimizer, train_loss, lambda: errors(*test).mean())


def ratings(seed: int, scale: float = 1.0) -> Task:
    """Ratings as products of two embeddings; a few users rate on a scale of their own. Plain SGD, too fast."""
    rng = _start(seed)
    users, items = nn.Embedding(40, 6), nn.Embedding(30, 6)
    model = nn.ModuleList([users, items])
    true_u, true_i = torch.randn(40, 3, generator=rng), torch.randn(30, 3, generator=rng)
    loud = 1 + 5.0 * (torch.rand(40, generator=rng) < 0.1)
    u, i = torch.randint(40, (1200,), generator=rng), torch.randint(30, (1200,), generator=rng)
    y = loud[u] * (true_u[u] * true_i[i]).sum(1) + 0.1 * torch.randn(1200, generator=rng)
    batch = minibatches(1000, 16, rng)

    def loss(rows: Tensor) -> Tensor:
        return (((users(u[rows]) * items(i[rows])).sum(1) - y[rows]) ** 2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.6 * scale)
    return Task.simple(model, optimizer, lambda: loss(next(batch)), lambda: loss(torch.arange(1000, 1200)))


def attention(seed: int, scale: float = 1.0) -> Task:
    """A transformer layer, normalised after, that finds the most frequent symbol. AdamW without a warm-up, too fast."""
    rng = _start(seed)
    embed, head = nn.Embedding(6, 16), nn.Linear(16, 6)
    layer = nn.TransformerEncoderLayer(16, 4, 48, dropout=0.0, batch_first=True)
    model = nn.ModuleList([embed, layer, head])

    def batch(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(6, (n, 9), generator=rng)
        return x, (nn.functional.one_hot(x, 6).sum(1) + torch.arange(6) / 10).argmax(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(head(layer(embed(x)).mean(1)), y)

    test = batch(128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.06 * scale)
    return Task.simple(model, optimizer, lambda: loss(*batch(16)), lambda: loss(*test), steps=150)


def student(seed: int, scale: float = 1.0) -> Task:
    """A linear fit of features up to the third power whose targets have noise without a variance. Batches of four."""
    rng = _start(seed)
    model = nn.Linear(9, 1)
    x = torch.randn(900, 3, generator=rng)
    x = torch.cat([x, x**2, x**3], 1)
    clean = x @ torch.randn(9, generator=rng)
    chi = torch.randn(900, generator=rng).square() + 1e-3
    noisy = clean + torch.randn(900, generator=rng) / chi.sqrt()
    batch = minibatches(700, 4, rng)

    def loss(rows: Tensor, y: Tensor) -> Tensor:
        return ((model(x[rows]).squeeze(1) - y[rows]) ** 2).mean()

    held_out = torch.arange(700, 900)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003 * scale, momentum=0.5)
    return Task.simple(model, optimizer, lambda: loss(next(batch), noisy), lambda: loss(held_out, clean))


def contrast(seed: int, scale: float = 1.0) -> Task:
    """Two noisy views of a point shall find each other among thirty-two, by dot products. SGD with momentum."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
    mix = torch.randn(5, 12, generator=rng)

    def views(n: int) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(n, 5, generator=rng)
        left, right = (hidden @ mix + 0.7 * torch.randn(n, 12, generator=rng) for _ in range(2))
        return left, right

    def loss(left: Tensor, right: Tensor) -> Tensor:
        alike = model(left) @ model(right).T
        return cross_entropy(alike, torch.arange(len(alike)))

    test = views(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * scale, momentum=0.9, nesterov=True)
    return Task.simple(model, optimizer, lambda: loss(*views(32)), lambda: loss(*test))


def rollout(seed: int, scale: float = 1.0) -> Task:
    """A learned map applied ten times over has to follow a pendulum; gradients grow with every turn. Plain SGD."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def pendulum(n: int) -> Tensor:
        at = [torch.stack([2 * torch.randn(n, generator=rng), torch.randn(n, generator=rng)], 1)]
        for _ in range(10):
            place, speed = at[-1].unbind(1)
            speed = speed - 0.4 * torch.sin(place)
            at.append(torch.stack([place + 0.4 * speed, speed], 1))
        return torch.stack(at)

    def loss(path: Tensor) -> Tensor:
        state, total = path[0], torch.zeros(())
        for target in path[1:]:
            state = state + model(state)
            total = total + ((state - target) ** 2).mean()
        return total / 10

    pool, test = pendulum(512), pendulum(64)
    batch = minibatches(512, 16, rng)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03 * scale)
    return Task.simple(model, optimizer, lambda: loss(pool[:, next(batch)]), lambda: loss(test), steps=120)


def vae(seed: int, scale: float = 1.0) -> Task:
    """A variational autoencoder that learns the variance of its output as well. RMSprop. Test: squared error."""
    rng = _start(seed)
    encode = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4))
    decode = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 20))
    model = nn.ModuleList([encode, decode])
    hidden = torch.randn(768, 2, generator=rng)
    x = torch.tanh(hidden @ torch.randn(2, 10, generator=rng)) + 0.05 * torch.randn(768, 10, generator=rng)
    batch = minibatches(512, 16, rng)

    def train_loss() -> Tensor:
        rows = next(batch)
        mean, log_var = encode(x[rows]).chunk(2, 1)
        z = mean + (log_var / 2).exp() * torch.randn(len(rows), 2, generator=rng)
        found, spread = decode(z).chunk(2, 1)
        fit = 0.5 * (spread + (found - x[rows]) ** 2 / spread.exp()).sum(1)
        return (fit + 0.5 * (mean**2 + log_var.exp() - log_var - 1).sum(1)).mean()

    def test_loss() -> Tensor:
        return ((decode(encode(x[512:])[:, :2])[:, :10] - x[512:]) ** 2).mean()

    return Task.simple(model, torch.optim.RMSprop(model.parameters(), lr=0.03 * scale), train_loss, test_loss)


def boosting(seed: int, scale: float = 1.0) -> Task:
    """Two classes by the exponential of the negative margin, one label in twenty wrong. SGD. Test: log loss."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 1))
    x = torch.randn(896, 4, generator=rng)
    sign = torch.sign(x[:, 0] * x[:, 1] + x[:, 2])
    wrong = torch.where(torch.rand(896, generator=rng) < 0.05, -sign, sign)
    batch = minibatches(640, 16, rng)

    def train_loss() -> Tensor:
        rows = next(batch)
        return torch.exp(-wrong[rows] * model(x[rows]).squeeze(1)).mean()

    def test_loss() -> Tensor:
        return binary_cross_entropy_with_logits(model(x[640:]).squeeze(1), (sign[640:] + 1) / 2)

    return Task.simple(model, torch.optim.SGD(model.parameters(), lr=0.3 * scale, momentum=0.5), train_loss, test_loss)


def graph(seed: int, scale: float = 1.0) -> Task:
    """Sums over neighbours in graphs, some of which have hubs. SGD with Nesterov momentum and weight decay."""
    rng = _start(seed)
    first, second, head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
    model = nn.ModuleList([first, second, head])

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(n, 12, 3, generator=rng)
        hubs = torch.rand(n, 12, 1, generator=rng) ** 6
        linked = (torch.rand(n, 12, 12, generator=rng) < 0.1 + 0.9 * hubs).float()
        linked = (linked + linked.mT).clamp(max=1)
        return x, linked, torch.sin(x[..., 0]).sum(1) + (linked @ x[..., 1:2]).squeeze(2).abs().mean(1)

    def loss(x: Tensor, linked: Tensor, y: Tensor) -> Tensor:
        h = first(torch.cat([x, linked @ x], 2)).relu()
        h = second(linked @ h).relu()
        return ((head(h.sum(1)).squeeze(1) - y) ** 2).mean()

    test = batch(64)
    parameters = model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=3e-4 * scale, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return Task.simple(model, optimizer, lambda: loss(*batch(16)), lambda: loss(*test), steps=150)


def values(seed: int, scale: float = 1.0) -> Task:
    """Values of a random walk learned from their own next value; a rare reward is large. Test: error of the values."""
    rng = _start(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    states, keep = 21, 0.9
    angle = torch.arange(states) * 2 * math.pi / states
    seen_as = torch.stack([angle.cos(), angle.sin()], 1)
    reward = torch.sin(2 * angle)
    walk = 0.5 * (torch.eye(states).roll(1, 1) + torch.eye(states).roll(-1, 1))
    truth = torch.linalg.solve(torch.eye(states) - keep * walk, reward)

    def train_loss() -> Tensor:
        at = torch.randint(states, (16,), generator=rng)
        after = (at + 2 * torch.randint(2, (16,), generator=rng) - 1) % states
        luck = torch.where(torch.rand(16, generator=rng) < 0.02, 25.0 * torch.randn(16, generator=rng), 0.0)
        target = reward[at] + luck + keep * model(seen_as[after]).squeeze(1).detach()
        return ((model(seen_as[at]).squeeze(1) - target) ** 2).mean()

    def test_loss() -> Tensor:
        return ((model(seen_as).squeeze(1) - truth) ** 2).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=0.03 * scale)
    return Task.simple(model, optimizer, train_loss, test_loss)


TASKS = {
    "adding": adding,
    "gan_modes": gan_modes,
    "control": control,
    "diffusion": diffusion,
    "ratings": ratings,
    "attention": attention,
    "student": student,
    "contrast": contrast,
    "rollout": rollout,
    "vae": vae,
    "boosting": boosting,
    "graph": graph,
    "values": values,
}
