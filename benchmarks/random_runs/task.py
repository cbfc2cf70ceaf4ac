"""A task: everything about a training run but its seed, drawn from a table of ranges by a number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from data import MEANINGS, Data, make_data
from losses import Loss, hidden_loss, make_loss
from models import make_model
from ranges import LONG, LONG_FROM, RANGES
from torch import Tensor, nn

GROUP = 10  # tasks whose models have the same form, so that all of them can be trained at once


def draw(which: str, number: int) -> dict[str, Any]:
    """Return the task of a number, as plain values. Tasks of a group differ in what has no part in the form."""
    ranges = LONG if which == "build" and number >= LONG_FROM else RANGES[which]
    shared, own = random.Random(f"{which} group {number // GROUP}"), random.Random(f"{which} {number}")
    data = shared.choice(list(ranges.models))
    meaning = MEANINGS[data]
    optimizer = shared.choice(list(ranges.optimizers))
    low, high, *_ = ranges.optimizers[optimizer]
    return {
        "which": which,
        "number": number,
        "data": data,
        "meaning": meaning,
        "model": shared.choice(ranges.models[data]),
        "loss": shared.choice(ranges.losses[meaning]),
        "optimizer": optimizer,
        "batch": shared.choice(ranges.batches),
        "steps": round(_between(shared, *ranges.steps)),
        "samples": round(_between(shared, *ranges.samples)),
        "width": round(_between(shared, *ranges.widths)),
        "depth": shared.randint(*ranges.depths),
        "activation": shared.choice(ranges.activations),
        "norm": shared.choice(ranges.norms),
        "features": shared.randint(*ranges.features),
        "classes": shared.randint(*ranges.classes),
        "length": shared.randint(*ranges.lengths),
        "dropout": shared.choice(ranges.dropouts),
        "lr": _between(own, low, high),
        "schedule": own.choice(ranges.schedules),
        "noise": own.choice(ranges.noise),
        "outliers": own.choice(ranges.outliers),
        "outlier size": own.choice((5.0, 15.0)),
        "label errors": own.choice(ranges.label_errors),
        "scale": own.choice(ranges.scales),
        "feature scale": own.choice((1.0, 1.0, 1.0, 10.0)),
        "weight decay": own.choice(ranges.weight_decay),
        "print": own.randrange(*ranges.prints),
        "prints": own.choice(ranges.times),
        "start": own.choice(ranges.starts),
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
        lr = task["lr"] * lr_scale
        self.optimizer = optimizer_of(task, list(self.model.parameters()), lr, task["weight decay"])
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule_of(task))
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
        self.model.eval()
        with torch.no_grad():
            value = loss(self.model(self.data.test_x), self.data.test_y, self.data.test_weight).item()
        self.model.train()
        return value


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
    model = make_model(task["model"], data, task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(task["start"])
    return model


def optimizer_of(task: dict[str, Any], parameters: list[Tensor], lr: float, weight_decay: float) -> Any:
    """Return the optimizer of a task with this learning rate."""
    *_, name, arguments = RANGES[task["which"]].optimizers[task["optimizer"]]
    return getattr(torch.optim, name)(parameters, lr=lr, weight_decay=weight_decay, **arguments)


def schedule_of(task: dict[str, Any]) -> Callable[[int], float]:
    """Return what the learning rate is multiplied by at each step."""
    return _SCHEDULES[task["schedule"]](task["steps"])


_SCHEDULES: dict[str, Any] = {
    "constant": lambda n: lambda i: 1.0,  # noqa: ARG005
    "cosine": lambda n: lambda i: 0.5 + 0.5 * math.cos(math.pi * min(i / n, 1.0)),
    "steps": lambda n: lambda i: 0.3 ** (3 * i // n),
    "warm-up": lambda n: lambda i: min(1.0, 10 * (i + 1) / n),
    "linear": lambda n: lambda i: max(1 - i / n, 0.0),
    "one cycle": lambda n: lambda i: max(min(i / (0.3 * n), (n - i) / (0.7 * n)), 0.02),
    "exponential": lambda n: lambda i: 0.03 ** (i / n),
    "square root": lambda n: lambda i: (1 + 20 * i / n) ** -0.5,
    "late drop": lambda n: lambda i: 1.0 if i < 0.7 * n else 0.1,
    "triangles": lambda n: lambda i: 0.1 + 0.9 * abs(4 * i / n % 2 - 1),
    "warm-up and cosine": lambda n: lambda i: min(1.0, 10 * (i + 1) / n) * (0.5 + 0.5 * math.cos(math.pi * i / n)),
    "polynomial": lambda n: lambda i: max(1 - i / n, 0.0) ** 2,
    "halving": lambda n: lambda i: 0.5 ** (6 * i // n),
    "rising": lambda n: lambda i: 0.1 + 0.9 * i / n,
    "trapezoid": lambda n: lambda i: max(0.0, min(1.0, 5 * (i + 1) / n, 5 * (n - i) / n)),
    "inverse time": lambda n: lambda i: 1 / (1 + 10 * i / n),
    "warm-up and linear": lambda n: lambda i: min(1.0, 8 * (i + 1) / n) * max(1 - i / n, 0.0),
    "flat and cosine": lambda n: lambda i: 1.0 if i < n / 2 else 0.5 + 0.5 * math.cos(math.pi * (2 * i / n - 1)),
    "noam": lambda n: lambda i: min((i + 1) / (0.15 * n), ((i + 1) / (0.15 * n)) ** -0.5),
    "restarts": lambda n: lambda i: 0.5 + 0.5 * math.cos(math.pi * (3 * i / n % 1)),
}
