"""A task of `steady.py`: a model, its optimizers with the loss each takes a step on, and a test loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss: TypeAlias = Callable[[], Tensor]


@dataclass
class Task:
    """One run to be.

    Attributes:
        model: What is trained.
        turns: The optimizers in the order of their turns within a step, each with its loss on a fresh batch.
        test_loss: The loss on held-out data, never below zero.
        steps: How many steps a run of length 1x has.
        after: What the script does after every step, such as that of a schedule.
    """

    model: nn.Module
    turns: list[tuple[Optimizer, Loss]]
    test_loss: Loss
    steps: int = 200
    after: Callable[[], object] | None = None

    @classmethod
    def simple(cls, model: nn.Module, optimizer: Optimizer, train_loss: Loss, test_loss: Loss, **rest: Any) -> Task:
        """Return a task with one optimizer."""
        return cls(model, [(optimizer, train_loss)], test_loss, **rest)

    def step(self) -> None:
        """Let every optimizer take one step."""
        for optimizer, loss in self.turns:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        if self.after is not None:
            self.after()

    def measure(self) -> float:
        """Return the test loss as a number."""
        self.model.eval()
        with torch.no_grad():
            found = self.test_loss().item()
        self.model.train()
        return found


def minibatches(n: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows of one batch after another: every epoch in a new order, an incomplete batch dropped."""
    while True:
        order = torch.randperm(n, generator=rng)
        yield from order[: n - n % size].split(size)
