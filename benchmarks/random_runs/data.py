"""Data of a task: what it is fitted to, and what it is judged on, which has no outliers nor label errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_TEST = 100
PEOPLE = 12
Made = tuple[Tensor, Tensor, int]  # inputs, targets, how many outputs a model has
# What a model's output means, by the kind of data
MEANINGS = {
    "regression": "values",
    "classes": "classes",
    "sequences": "values",
    "images": "classes",
    "text": "classes",
    "bandit": "actions",
    "autoencoding": "values",
    "imbalanced": "classes",
    "binary": "binary",
    "spread": "spread",
    "values of actions": "q",
    "polynomials": "values",
    "ratings": "values",
    "series": "values",
    "heavy tails": "values",
    "parity": "classes",
    "counts": "counts",
    "matching": "matching",
    "codes": "codes",
    "sets": "values",
    "coordinates": "values",
    "claims": "values",
    "denoising": "values",
    "signals": "classes",
    "copying": "classes",
    "graphs": "classes",
    "rankings": "order",
    "lifetimes": "lifetimes",
    "directions": "directions",
    "two branches": "mixture",
}


@dataclass(frozen=True)
class Data:
    """Inputs, targets, weights of samples; for training and for testing."""

    x: Tensor
    y: Tensor
    weight: Tensor
    test_x: Tensor
    test_y: Tensor
    test_weight: Tensor
    outputs: int
    meaning: str  # of what a model returns, as in MEANINGS


def make_data(kind: str, task: dict[str, float], generator: torch.Generator) -> Data:
    """Draw the data of a task of a kind."""
    n = int(task["samples"])
    (x, y, outputs), meaning = _MAKERS[kind](n + _TEST, task, generator), MEANINGS[kind]
    weight = torch.exp(torch.randn(n + _TEST, generator=generator))
    train = y[:n].clone()
    if meaning in ("values", "spread", "counts", "mixture"):
        _add_outliers(train, task, generator)
    elif meaning == "order":
        bad = torch.rand(n, generator=generator) < task["label errors"]
        train[bad] = 1 - train[bad]
    elif meaning == "classes":
        _swap_labels(train, outputs, task, generator)
    return Data(x[:n], train, weight[:n], x[n:], y[n:], weight[n:], outputs, meaning)


def _add_outliers(y: Tensor, task: dict[str, float], generator: torch.Generator) -> None:
    bad = torch.rand(len(y), generator=generator) < task["outliers"]
    y[bad] *= task["outlier size"]


def _swap_labels(y: Tensor, outputs: int, task: dict[str, float], generator: torch.Generator) -> None:
    bad = torch.rand(y.shape, generator=generator) < task["label errors"]
    y[bad] = torch.randint(outputs, y.shape, generator=generator)[bad]


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _regression(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    width = int(task["features"])
    x = _normal(n, width, generator=g)
    clean = _teacher(x, 1, g).squeeze(1)
    y = clean / clean.std() + task["noise"] * _normal(n, generator=g)
    scales = torch.exp(math.log(task["feature scale"]) * torch.rand(width, generator=g))
    return x * scales, task["scale"] * y, 1


def _classes(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    k = int(task["classes"])
    x = _normal(n, int(task["features"]), generator=g)
    y = (_teacher(x, k, g) + task["noise"] * _normal(n, k, generator=g)).argmax(1)
    return x * task["feature scale"] ** 0.5, y, k


def _sequences(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """A sum of the marked entries: two of a sequence."""
    length = int(task["length"])
    values = torch.rand(n, length, generator=g)
    marks = torch.zeros(n, length).scatter_(1, torch.rand(n, length, generator=g).topk(2, 1).indices, 1.0)
    y = (values * marks).sum(1) * 2 + task["noise"] * 0.3 * _normal(n, generator=g)
    return torch.stack((values, marks), 2), task["scale"] * y, 1


def _images(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    k = int(task["classes"])
    y = torch.randint(k, (n,), generator=g)
    patterns = _normal(k, 1, 8, 8, generator=g)
    return patterns[y] + (1 + 3 * task["noise"]) * _normal(n, 1, 8, 8, generator=g), y, k


def _text(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Letters of which each depends on the one before."""
    k, length = int(task["classes"]) + 4, int(task["length"])
    table = torch.softmax(3 * _normal(k, k, generator=g), 1)
    letters = [torch.randint(k, (n,), generator=g)]
    for _ in range(length):
        letters.append(torch.multinomial(table[letters[-1]], 1, generator=g).squeeze(1))
    text = torch.stack(letters, 1)
    return text[:, :-1], text[:, 1:].clone(), k


def _bandit(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Rewards between 0 and 1 of each of some actions, by the features of a situation."""
    k = int(task["classes"])
    x = _normal(n, int(task["features"]), generator=g)
    reward = torch.sigmoid(2 * _teacher(x, k, g) + task["noise"] * _normal(n, k, generator=g))
    return x, task["scale"] * reward, k


def _autoencoding(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Points near a surface of three dimensions, to be given back."""
    width = int(task["features"]) + 4
    points = torch.tanh(_normal(n, 3, generator=g) @ _normal(3, width, generator=g))
    x = points + task["noise"] * _normal(n, width, generator=g)
    return x, task["scale"] * x.clone(), width


def _imbalanced(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Two classes, one of them rare."""
    x = _normal(n, int(task["features"]), generator=g)
    score = _teacher(x, 1, g).squeeze(1) + task["noise"] * _normal(n, generator=g)
    return x * task["feature scale"] ** 0.5, (score > score.quantile(0.92)).long(), 2


def _binary(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Several labels that hold or not."""
    x, k = _normal(n, int(task["features"]), generator=g), int(task["classes"])
    return x, (_teacher(x, k, g) + task["noise"] * _normal(n, k, generator=g) > 0.3).float(), k


def _spread(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Values whose noise depends on the input; a model returns a mean and the logarithm of a variance."""
    x = _normal(n, int(task["features"]), generator=g)
    y = _teacher(x, 1, g).squeeze(1) + task["noise"] * torch.exp(x[:, 0]) * _normal(n, generator=g)
    return x, task["scale"] * y, 2


def _values_of_actions(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Situations with the one that follows; an action and its reward."""
    width, k = int(task["features"]), int(task["classes"])
    x, moves = _normal(n, width, generator=g), 0.5 * _normal(k, width, generator=g)
    action = torch.randint(k, (n,), generator=g)
    after = 0.9 * x + moves[action] + task["noise"] * _normal(n, width, generator=g)
    return torch.stack((x, after), 1), torch.stack((action, task["scale"] * torch.tanh(after[:, 0])), 1), k


def _polynomials(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Powers of one number, which hardly differ."""
    t, width = 2 * torch.rand(n, generator=g) - 1, int(task["features"])
    x = torch.stack([t**i * task["feature scale"] ** (i / width) for i in range(1, width + 1)], 1)
    return x, task["scale"] * (torch.sin(4 * t) + task["noise"] * _normal(n, generator=g)), 1


def _ratings(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """What each of some people thinks of each of some things."""
    people, things = _normal(PEOPLE, 3, generator=g), _normal(PEOPLE, 3, generator=g)
    x = torch.randint(PEOPLE, (n, 2), generator=g)
    y = (people[x[:, 0]] * things[x[:, 1]]).sum(1) + task["noise"] * _normal(n, generator=g)
    return x, task["scale"] * y, 1


def _series(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """What follows in a noisy wave."""
    length = int(task["length"]) + 1
    times = torch.arange(length) + 6 * torch.rand(n, 1, generator=g)
    speed = 0.3 + torch.rand(n, 1, generator=g)
    wave = torch.sin(speed * times) * (1 + torch.rand(n, 1, generator=g))
    wave = task["scale"] * (wave + 0.5 * task["noise"] * _normal(n, length, generator=g))
    return wave[:, :-1, None], wave[:, -1].clone(), 1


def _heavy_tails(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Features of which a few are very large."""
    x = _normal(n, int(task["features"]), generator=g)
    x = x / _normal(n, 1, generator=g).abs().clamp_min(0.2)
    y = _teacher(x.clamp(-3, 3), 1, g).squeeze(1) + task["noise"] * _normal(n, generator=g)
    return x, task["scale"] * y, 1


def _parity(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Whether an even number of three signs is positive."""
    x = torch.randint(2, (n, int(task["features"])), generator=g).float() * 2 - 1
    return x, (x[:, :3].prod(1) > 0).long(), 2


def _counts(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    x = _normal(n, int(task["features"]), generator=g)
    rate = torch.exp((_teacher(x, 1, g).squeeze(1) + task["noise"] * _normal(n, generator=g)).clamp(-3, 2))
    return x * task["feature scale"] ** 0.5, torch.poisson(task["scale"] * rate, generator=g), 1


def _matching(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Two noisy views of one thing."""
    x = _normal(n, 1, int(task["features"]), generator=g).expand(-1, 2, -1)
    x = x + (0.2 + task["noise"]) * _normal(*x.shape, generator=g)
    return x, torch.zeros(n), 8


def _codes(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    x, _, width = _autoencoding(n, task, g)
    return task["scale"] * x, task["scale"] * x, width


def _sets(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Points, of which the largest of a property counts."""
    x = _normal(n, int(task["length"]), int(task["features"]), generator=g)
    y = _teacher(x.flatten(0, 1), 1, g).view(n, -1).amax(1) + task["noise"] * _normal(n, generator=g)
    return x, task["scale"] * y, 1


def _coordinates(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Heights over a square: a sum of waves."""
    x = 2 * torch.rand(n, 2, generator=g) - 1
    waves = torch.sin(x @ (4 * _normal(2, 5, generator=g)) + 6 * torch.rand(5, generator=g))
    y = waves @ _normal(5, generator=g) / 5**0.5 + task["noise"] * _normal(n, generator=g)
    return x * task["feature scale"] ** 0.5, task["scale"] * y, 1


def _claims(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Amounts of which most are nothing, and a few large."""
    x = _normal(n, int(task["features"]), generator=g)
    amount = torch.exp(0.7 * _teacher(x, 1, g).squeeze(1) + 0.8 * _normal(n, generator=g))
    happens = torch.rand(n, generator=g) < torch.sigmoid(_teacher(x, 1, g).squeeze(1) - 1 + task["noise"])
    return x * task["feature scale"] ** 0.5, task["scale"] * amount * happens, 1


def _denoising(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    width = int(task["features"]) + 3
    points = torch.sin(_normal(n, 2, generator=g) @ _normal(2, width, generator=g))
    return points + (0.3 + task["noise"]) * _normal(n, width, generator=g), task["scale"] * points, width


def _signals(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Waves of as many pitches as there are classes."""
    k, length = int(task["classes"]), int(task["length"]) + 6
    y = torch.randint(k, (n,), generator=g)
    pitch = torch.linspace(0.4, 2.2, k)[y][:, None]
    wave = torch.sin(pitch * torch.arange(length) + 6 * torch.rand(n, 1, generator=g))
    return (wave + (0.2 + task["noise"]) * _normal(n, length, generator=g))[:, :, None], y, k


def _copying(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Letters, of which the one before the last is to be said again."""
    k, length = int(task["classes"]) + 2, int(task["length"])
    letters = torch.randint(k, (n, length), generator=g)
    return letters, torch.cat((letters[:, :2], letters[:, :-2]), 1), k


def _graphs(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Six nodes with features, after the edges of each; the class is that of what neighbours have in the mean."""
    k, nodes = int(task["classes"]), 6
    edges = (torch.rand(n, nodes, nodes, generator=g) < 0.4).float().triu(1)
    edges = edges + edges.transpose(1, 2) + torch.eye(nodes)
    edges = edges / edges.sum(2, keepdim=True)
    x = _normal(n, nodes, int(task["features"]), generator=g)
    scores = _teacher((edges @ x).flatten(0, 1), k, g).view(n, nodes, k).mean(1)
    return torch.cat((edges, x), 2), (scores + 0.3 * task["noise"] * _normal(n, k, generator=g)).argmax(1), k


def _rankings(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """Pairs, and whether the first is the better one."""
    x = _normal(n, 2, int(task["features"]), generator=g)
    worth = _teacher(x.flatten(0, 1), 1, g).view(n, 2) + task["noise"] * _normal(n, 2, generator=g)
    return x * task["feature scale"] ** 0.5, (worth[:, 0] > worth[:, 1]).float(), 1


def _lifetimes(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """How long something lasted, and whether that was its end or only as long as one looked."""
    x = _normal(n, int(task["features"]), generator=g)
    rate = torch.exp((_teacher(x, 1, g).squeeze(1) + task["noise"] * _normal(n, generator=g)).clamp(-3, 3))
    time = -torch.log(torch.rand(n, generator=g).clamp_min(1e-3)) / rate * task["scale"]
    until = 2 * task["scale"]
    return x * task["feature scale"] ** 0.5, torch.stack((time.clamp(1e-3, until), (time < until).float()), 1), 1


def _directions(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    x = _normal(n, int(task["features"]), generator=g)
    y = _teacher(x, 3, g) + 0.5 * task["noise"] * _normal(n, 3, generator=g)
    return x * task["feature scale"] ** 0.5, y / y.norm(dim=1, keepdim=True), 3


def _two_branches(n: int, task: dict[str, float], g: torch.Generator) -> Made:
    """A value, or as likely its opposite; a model returns weights, means and log variances of two of them."""
    x = _normal(n, int(task["features"]), generator=g)
    sign = torch.randint(2, (n,), generator=g) * 2 - 1
    return x, task["scale"] * (sign * (1 + _teacher(x, 1, g).squeeze(1)) + task["noise"] * _normal(n, generator=g)), 6


def _teacher(x: Tensor, outputs: int, g: torch.Generator) -> Tensor:
    width = x.shape[1]
    hidden = torch.tanh(x @ _normal(width, 12, generator=g) / width**0.5)
    return hidden @ _normal(12, outputs, generator=g) / 12**0.5 + x @ _normal(width, outputs, generator=g) / width


_MAKERS = {
    "regression": _regression,
    "classes": _classes,
    "sequences": _sequences,
    "images": _images,
    "text": _text,
    "bandit": _bandit,
    "autoencoding": _autoencoding,
    "imbalanced": _imbalanced,
    "binary": _binary,
    "spread": _spread,
    "values of actions": _values_of_actions,
    "polynomials": _polynomials,
    "ratings": _ratings,
    "series": _series,
    "heavy tails": _heavy_tails,
    "parity": _parity,
    "counts": _counts,
    "matching": _matching,
    "codes": _codes,
    "sets": _sets,
    "coordinates": _coordinates,
    "claims": _claims,
    "denoising": _denoising,
    "signals": _signals,
    "copying": _copying,
    "graphs": _graphs,
    "rankings": _rankings,
    "lifetimes": _lifetimes,
    "directions": _directions,
    "two branches": _two_branches,
}
