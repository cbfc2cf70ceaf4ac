"""A task: everything about a training run but its seed, drawn from a table of ranges by a number."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from data import Data, make_data
from losses import Loss, hidden_loss, make_loss
from models import make_model
from ranges import RANGES
from torch import Tensor, nn

_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def draw(which: str, number: int) -> dict[str, Any]:
    """Return the task of a number, as plain values."""
    ranges, rng = RANGES[which], random.Random(f"{which} {number}")
    data = rng.choice(list(ranges.models))
    meaning = {"regression": "values", "sequences": "values", "bandit": "actions"}.get(data, "classes")
    optimizer = rng.choice(list(ranges.optimizers))
    low, high, _ = ranges.optimizers[optimizer]
    return {
        "which": which,
        "number": number,
        "data": data,
        "meaning": meaning,
        "model": rng.choice(ranges.models[data]),
        "loss": rng.choice(ranges.losses[meaning]),
        "optimizer": optimizer,
        "lr": _between(rng, low, high),
        "schedule": rng.choice(ranges.schedules),
        "batch": rng.choice(ranges.batches),
        "steps": round(_between(rng, *ranges.steps)),
        "samples": round(_between(rng, *ranges.samples)),
        "width": round(_between(rng, *ranges.widths)),
        "depth": rng.randint(*ranges.depths),
        "activation": rng.choice(ranges.activations),
        "norm": rng.choice(ranges.norms),
        "noise": rng.choice(ranges.noise),
        "outliers": rng.choice(ranges.outliers),
        "outlier size": rng.choice((5.0, 15.0)),
        "label errors": rng.choice(ranges.label_errors),
        "scale": rng.choice(ranges.scales),
        "feature scale": rng.choice((1.0, 1.0, 1.0, 10.0)),
        "features": rng.randint(3, 12),
        "classes": rng.randint(2, 8),
        "length": rng.randint(5, 9),
        "weight decay": rng.choice(ranges.weight_decay),
        "print": rng.randrange(*ranges.prints),
        "prints": rng.choice((8, 12, 20, 40)),
    }


def _between(rng: random.Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is as likely anywhere."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


class Training:
    """A task that trains: `step` returns the loss of a batch, `test` that on other data as a script computes it.

    `look` returns the same without a trace: what is recorded knows the test loss only where the script computes it.

    Args:
        task: From `draw`.
        seed: Of the weights and of the order of the batches; the data are the task's.
        lr_scale: What the learning rate is multiplied by.
    """

    def __init__(self, task: dict[str, Any], seed: int, lr_scale: float = 1.0) -> None:
        self.data = data_of(task)
        self.batches = Batches(task, seed, len(self.data.x))
        self.model = model_of(task, seed, self.data)
        self.optimizer, self._schedule = optimizer_of(task, list(self.model.parameters()), lr_scale)
        self._loss = make_loss(task["loss"], task["meaning"])
        self._hidden = hidden_loss(task["loss"], task["meaning"])
        self._test_loss = self._hidden if task["meaning"] == "actions" else self._loss

    def step(self) -> float:
        """Take a step."""
        rows, data = self.batches.draw(), self.data
        self.optimizer.zero_grad()
        loss = self._loss(self.model(data.x[rows]), data.y[rows], data.weight[rows])
        loss.backward()
        self.optimizer.step()
        self._schedule.step()
        return loss.item()

    def test(self) -> float:
        """Return the loss on other data."""
        return self._evaluate(self._test_loss)

    def look(self) -> float:
        """Return the loss on other data, unseen by what observes the loss functions of torch."""
        return self._evaluate(self._hidden)

    def _evaluate(self, loss: Loss) -> float:
        with torch.no_grad():
            return loss(self.model(self.data.test_x), self.data.test_y, self.data.test_weight).item()


class Batches:
    """The rows of each batch: each epoch has an order of its own."""

    def __init__(self, task: dict[str, Any], seed: int, n: int) -> None:
        self._n, self._size = n, min(task["batch"] or n, n)
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long)

    def draw(self) -> Tensor:
        """Return the next ones."""
        if len(self._order) < self._size:
            self._order = torch.randperm(self._n, generator=self._generator)
        rows, self._order = self._order[: self._size], self._order[self._size :]
        return rows


def data_of(task: dict[str, Any]) -> Data:
    """Return the data of a task."""
    return make_data(task["data"], task, torch.Generator().manual_seed(task["number"]))


def model_of(task: dict[str, Any], seed: int, data: Data) -> nn.Module:
    """Return the model of a task, with the weights of a seed."""
    torch.manual_seed(1000 * task["number"] + seed)
    return make_model(task["model"], data, task)


def optimizer_of(task: dict[str, Any], parameters: list[Tensor], lr_scale: float = 1.0) -> tuple[Any, Any]:
    """Return the optimizer of a task, and its schedule."""
    *_, arguments = RANGES[task["which"]].optimizers[task["optimizer"]]
    make = _OPTIMIZERS.get(task["optimizer"], torch.optim.SGD)
    optimizer = make(parameters, lr=task["lr"] * lr_scale, weight_decay=task["weight decay"], **arguments)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _SCHEDULES[task["schedule"]](task["steps"]))


_SCHEDULES: dict[str, Any] = {
    "constant": lambda n: lambda i: 1.0,  # noqa: ARG005
    "cosine": lambda n: lambda i: 0.5 + 0.5 * math.cos(math.pi * min(i / n, 1.0)),
    "steps": lambda n: lambda i: 0.3 ** (3 * i // n),
    "warm-up": lambda n: lambda i: min(1.0, 10 * (i + 1) / n),
    "linear": lambda n: lambda i: max(1 - i / n, 0.0),
    "one cycle": lambda n: lambda i: max(min(i / (0.3 * n), (n - i) / (0.7 * n)), 0.02),
    "exponential": lambda n: lambda i: 0.03 ** (i / n),
    "restarts": lambda n: lambda i: 0.5 + 0.5 * math.cos(math.pi * (3 * i / n % 1)),
}
