"""Train many models of one form at once: tasks of a group, in several ways, with several seeds.

All parameters are rows of one matrix, a row for each model, and torch's own optimizer says how far to go for a learning
rate of 1; the rest is done by hand, row by row: the learning rate and its schedule, weight decay, clipping. It gives
what each model would have given alone (`tests/meta/test_random_runs.py` compares it with a monitored run).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from looks import LOOKS, falls_on
from losses import hidden_loss, make_loss
from task import Batches, data_of, model_of, optimizer_of, schedule_of
from torch import Tensor, nn
from torch.func import functional_call, vmap


@dataclass(frozen=True)
class Way:
    """One model: which task of the group, which seed, what it is clipped by, and what multiplies its learning rate."""

    task: int
    seed: int
    clip: float | str | None = None
    lr_scale: float = 1.0


@dataclass
class Traces:
    """What happened, as tensors with a row for each model: `looks` at the test loss, and a list entry for each step."""

    looks: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)  # of each parameter
    lr: list[Tensor] = field(default_factory=list)
    cosine: list[Tensor] = field(default_factory=list)  # of the last step and the gradient
    update: list[Tensor] = field(default_factory=list)
    clip: list[Tensor] = field(default_factory=list)  # the factors


def train_together(tasks: list[dict[str, Any]], ways: list[Way], traced: bool = False) -> Traces:
    """Train every way; with `traced`, note what a record holds of each step."""
    first, data = tasks[0], [data_of(task) for task in tasks]
    which = torch.tensor([way.task for way in ways])
    x, y, w = (torch.stack([getattr(d, name) for d in data])[which] for name in ("x", "y", "weight"))
    test = [torch.stack([getattr(d, name) for d in data])[which] for name in ("test_x", "test_y", "test_weight")]
    models = [model_of(tasks[way.task], way.seed, data[way.task]) for way in ways]
    sizes = [p.numel() for p in models[0].parameters()]
    weights = nn.Parameter(torch.stack([_flat(model) for model in models]))
    towards = nn.Parameter(torch.zeros_like(weights))
    optimizer, rates = optimizer_of(first, [towards], 1.0, 0.0), _Rates(tasks, ways)
    decay = torch.tensor([[tasks[way.task]["weight decay"]] for way in ways])
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    clip, apply = _Clipping(weights, ways), _applied(models[0])
    trained, shown = make_loss(first["loss"], first["meaning"]), hidden_loss(first["loss"], first["meaning"])
    batches = {way.seed: Batches(first, way.seed, x.shape[1]) for way in ways}
    every, traces = torch.arange(len(ways))[:, None], Traces()
    losses = vmap(lambda row, x, y, w: trained(apply(row, x), y, w), randomness="different")
    tests = vmap(lambda row, x, y, w: shown(apply(row, x), y, w), randomness="different")
    for step in range(first["steps"]):
        drawn = {seed: b.draw() for seed, b in batches.items()}
        rows = torch.stack([drawn[way.seed] for way in ways])
        weights.grad = None
        loss = losses(weights, x[every, rows], y[every, rows], w[every, rows])
        loss.sum().backward()
        with torch.no_grad():
            grad, lr = weights.grad, rates.at(step)
            if traced:
                traces.loss.append(loss.detach())
                _trace(traces, grad, sizes, lr, towards)
            factors = clip(grad)
            towards.grad = grad if decoupled else grad + decay * weights
            towards.zero_()
            optimizer.step()
            towards.mul_(lr)
            if decoupled:
                towards.sub_(lr * decay * weights)
            weights.add_(towards)
            if traced:
                traces.update.append(_norm(towards) / _norm(weights))
                traces.clip.append(factors)
            if falls_on(step + 1, first["steps"], LOOKS) and (traced or step > 0.8 * first["steps"]):
                models[0].eval()
                traces.looks.append(tests(weights, *test))
                models[0].train()
    return traces


def _trace(traces: Traces, grad: Tensor, sizes: list[int], lr: Tensor, last: Tensor) -> None:
    traces.norms.append(torch.stack([_norm(part) for part in grad.split(sizes, 1)], 1))
    traces.lr.append(lr[:, 0])
    traces.cosine.append((last * grad).sum(1) / (_norm(last) * _norm(grad)))


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _applied(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that applies the model with the parameters in a row."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def apply(row: Tensor, x: Tensor) -> Tensor:
        parts = row.split([shape.numel() for shape in shapes.values()])
        return functional_call(model, {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}, (x,))

    return apply


class _Rates:
    """The learning rate of each row at each step."""

    def __init__(self, tasks: list[dict[str, Any]], ways: list[Way]) -> None:
        self._base = [tasks[way.task]["lr"] * way.lr_scale for way in ways]
        self._schedules, self._tasks = [schedule_of(task) for task in tasks], [way.task for way in ways]

    def at(self, step: int) -> Tensor:
        factors = [schedule(step) for schedule in self._schedules]
        return torch.tensor([[base * factors[task]] for base, task in zip(self._base, self._tasks, strict=True)])


class _Clipping:
    """Clips each row in its way. A row with a gradient that is not finite takes no part in the step."""

    def __init__(self, weights: nn.Parameter, ways: list[Way]) -> None:
        self._limit = torch.tensor([way.clip if isinstance(way.clip, float) else math.inf for way in ways])
        self._skips = torch.tensor([way.clip is not None for way in ways])
        self._rows = torch.tensor([i for i, way in enumerate(ways) if way.clip == "auto"], dtype=torch.long)
        self._auto, self._weights = _Auto(weights.detach()[self._rows]), weights.detach()

    def __call__(self, grad: Tensor) -> Tensor:
        """Clip in place, and return the factors."""
        norm = _norm(grad)
        bad = self._skips & ~norm.isfinite()
        limit = self._limit.clone()
        if len(self._rows):
            limit[self._rows] = self._auto.limits(self._weights[self._rows], grad[self._rows], norm[self._rows])
        factors = (limit / norm).clamp(max=1.0).nan_to_num(1.0)
        grad.mul_(factors[:, None])
        grad[bad] = 0.0
        return factors


class _Auto:
    """The rule of `gradrein.policies.ByOvershoot` with its defaults, for many models at once."""

    def __init__(self, weights: Tensor) -> None:
        self._average, self._limit = weights.clone(), torch.zeros(len(weights))
        self._window, self._seen = (
            torch.full((len(weights), 100), math.nan),
            torch.zeros(len(weights), dtype=torch.long),
        )

    def limits(self, weights: Tensor, grad: Tensor, norm: Tensor) -> Tensor:
        """Return the norm that each row is clipped to."""
        good = (norm > 0) & norm.isfinite()
        cosine = self._cosine(weights, grad, norm)
        share = good / (5.0 + 0.25 * self._seen).clamp(max=60.0)
        self._average += share[:, None] * (weights - self._average).nan_to_num()
        window = self._window.scatter(1, (self._seen % 100)[:, None], norm[:, None])
        calm, largest = window.nanquantile(0.25, dim=1), window.nan_to_num(-1.0).amax(1)
        moved = self._limit * torch.exp(-0.2 * cosine)
        limit = torch.where(self._seen == 0, norm, moved * (calm / moved) ** 0.005)
        limit = torch.minimum(torch.maximum(limit, 0.1 * calm), largest)
        self._limit = torch.where(good, limit, self._limit)
        self._window = torch.where(good[:, None], window, self._window)
        self._seen += good
        return self._limit

    def _cosine(self, weights: Tensor, grad: Tensor, norm: Tensor) -> Tensor:
        way = weights - self._average
        inward = (-(way * weights).sum(1) / weights.square().sum(1)).nan_to_num().clamp(min=0)
        rest = way + inward[:, None] * weights
        cosine = (rest * grad).sum(1) / (_norm(rest) * norm)
        return torch.nan_to_num(cosine * (_norm(rest) > 2.0**-20 * _norm(way)), 0.0, 0.0, 0.0)
