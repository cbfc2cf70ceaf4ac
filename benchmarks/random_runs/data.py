"""Data of a task: what it is fitted to, and what it is judged on, which has no outliers nor label errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_TEST = 100


@dataclass(frozen=True)
class Data:
    """Inputs, targets (values, classes, or the reward of each action), weights of samples; for training and testing."""

    x: Tensor
    y: Tensor
    weight: Tensor
    test_x: Tensor
    test_y: Tensor
    test_weight: Tensor
    outputs: int
    meaning: str  # of what a model returns: "values", "classes", "actions"


def make_data(kind: str, task: dict[str, float], generator: torch.Generator) -> Data:
    """Draw the data of a task of a kind."""
    n = int(task["samples"])
    x, y, outputs, meaning = _MAKERS[kind](n + _TEST, task, generator)
    weight = torch.exp(torch.randn(n + _TEST, generator=generator))
    train = y[:n].clone()
    spoil = _add_outliers if meaning == "values" else _swap_labels
    if meaning != "actions":
        spoil(train, outputs, task, generator)
    return Data(x[:n], train, weight[:n], x[n:], y[n:], weight[n:], outputs, meaning)


def _add_outliers(y: Tensor, _outputs: int, task: dict[str, float], generator: torch.Generator) -> None:
    bad = torch.rand(len(y), generator=generator) < task["outliers"]
    y[bad] *= task["outlier size"]


def _swap_labels(y: Tensor, outputs: int, task: dict[str, float], generator: torch.Generator) -> None:
    bad = torch.rand(y.shape, generator=generator) < task["label errors"]
    y[bad] = torch.randint(outputs, y.shape, generator=generator)[bad]


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _regression(n: int, task: dict[str, float], g: torch.Generator) -> tuple[Tensor, Tensor, int, str]:
    width = int(task["features"])
    x = _normal(n, width, generator=g)
    clean = _teacher(x, 1, g).squeeze(1)
    y = clean / clean.std() + task["noise"] * _normal(n, generator=g)
    scales = torch.exp(math.log(task["feature scale"]) * torch.rand(width, generator=g))
    return x * scales, task["scale"] * y, 1, "values"


def _classes(n: int, task: dict[str, float], g: torch.Generator) -> tuple[Tensor, Tensor, int, str]:
    k = int(task["classes"])
    x = _normal(n, int(task["features"]), generator=g)
    y = (_teacher(x, k, g) + task["noise"] * _normal(n, k, generator=g)).argmax(1)
    return x * task["feature scale"] ** 0.5, y, k, "classes"


def _sequences(n: int, task: dict[str, float], g: torch.Generator) -> tuple[Tensor, Tensor, int, str]:
    """A sum of the marked entries: two of a sequence."""
    length = int(task["length"])
    values = torch.rand(n, length, generator=g)
    marks = torch.zeros(n, length).scatter_(1, torch.rand(n, length, generator=g).topk(2, 1).indices, 1.0)
    y = (values * marks).sum(1) * 2 + task["noise"] * 0.3 * _normal(n, generator=g)
    return torch.stack((values, marks), 2), task["scale"] * y, 1, "values"


def _images(n: int, task: dict[str, float], g: torch.Generator) -> tuple[Tensor, Tensor, int, str]:
    k = int(task["classes"])
    y = torch.randint(k, (n,), generator=g)
    patterns = _normal(k, 1, 8, 8, generator=g)
    return patterns[y] + (1 + 3 * task["noise"]) * _normal(n, 1, 8, 8, generator=g), y, k, "classes"


def _text(n: int, task: dict[str, float], g: torch.Generator) -> tuple[Tensor, Tensor, int, str]:
    """Letters of which each depends on the one before."""
    k, length = int(task["classes"]) + 4, int(task["length"])
    table = torch.softmax(3 * _normal(k, k, generator=g), 1)
    letters = [torch.randint(k, (n,), generator=g)]
    for _ in range(length):
        letters.append(torch.multinomial(table[letters[-1]], 1, generator=g).squeeze(1))
    text = torch.stack(letters, 1)
    return text[:, :-1], text[:, 1:].clone(), k, "classes"


def _bandit(n: int, task: dict[str, float], g: torch.Generator) -> tuple[Tensor, Tensor, int, str]:
    """Rewards between 0 and 1 of each of some actions, by the features of a situation."""
    k = int(task["classes"])
    x = _normal(n, int(task["features"]), generator=g)
    reward = torch.sigmoid(2 * _teacher(x, k, g) + task["noise"] * _normal(n, k, generator=g))
    return x, task["scale"] * reward, k, "actions"


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
}
