"""Train many models of one task at once: they differ in seed, clipping and learning rate, and take the same time.

All parameters are rows of one matrix, a row for each model. torch's own optimizer steps on it; a row's learning rate
scales how far its step went, which is the same for optimizers whose step is proportional to it, as all here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from looks import LOOKS, falls_on, final
from losses import hidden_loss, make_loss
from task import Batches, data_of, model_of, optimizer_of
from torch import Tensor, nn
from torch.func import functional_call, vmap

import gradrein

Way = tuple[int, float, float | str | None, float]  # seed, usual norm, clipping as a part of it, learning rate


def train_together(task: dict[str, Any], ways: list[Way]) -> list[float | None]:
    """Return what becomes of the test loss in each way; None where it is not finite."""
    data = data_of(task)
    models = {seed: model_of(task, seed, data) for seed, *_ in ways}
    batches = {seed: Batches(task, seed, len(data.x)) for seed in models}
    weights = nn.Parameter(torch.stack([_flat(models[seed]) for seed, *_ in ways]))
    optimizer, schedule = optimizer_of(task, [weights])
    clip, scale = _Clipping(weights, ways), torch.tensor([[way[3]] for way in ways])
    trained, shown = make_loss(task["loss"], task["meaning"]), hidden_loss(task["loss"], task["meaning"])
    apply = _applied(next(iter(models.values())))

    def batch_loss(row: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return trained(apply(row, x), y, w)

    def test_loss(row: Tensor) -> Tensor:
        return shown(apply(row, data.test_x), data.test_y, data.test_weight)

    looks: list[Tensor] = []
    for step in range(1, task["steps"] + 1):
        drawn = {seed: b.draw() for seed, b in batches.items()}
        rows = torch.stack([drawn[seed] for seed, *_ in ways])
        optimizer.zero_grad()
        vmap(batch_loss, randomness="different")(
            weights, data.x[rows], data.y[rows], data.weight[rows]
        ).sum().backward()
        clip(weights.grad)
        before = weights.detach().clone()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            weights.copy_(before + scale * (weights - before))
        if step > 0.8 * task["steps"] and falls_on(step, task["steps"], LOOKS):
            with torch.no_grad():
                looks.append(vmap(test_loss)(weights))
    return [final(column) for column in torch.stack(looks, 1).tolist()]


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _applied(model: nn.Module) -> Any:
    """Return a function that applies the model with the parameters in a row."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def apply(row: Tensor, x: Tensor) -> Tensor:
        parts = row.split([shape.numel() for shape in shapes.values()])
        return functional_call(model, {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}, (x,))

    return apply


class _Clipping:
    """Clips each row in its way. A row with a gradient that is not finite takes no part in the step."""

    def __init__(self, weights: nn.Parameter, ways: list[Way]) -> None:
        limits = [norm * clip if isinstance(clip, float) and norm * clip > 0 else math.inf for _, norm, clip, _ in ways]
        self._limit = torch.tensor(limits)
        self._skips = torch.tensor([clip is not None for _, _, clip, _ in ways])
        self._named = {
            i: ({"weights": nn.Parameter(weights.detach()[i])}, gradrein.policies.ByOvershoot())
            for i, (_, _, clip, _) in enumerate(ways)
            if clip == "auto"
        }

    def __call__(self, grad: Tensor) -> None:
        """Clip in place."""
        norm = torch.linalg.vector_norm(grad, dim=1)
        bad = self._skips & ~norm.isfinite()
        grad.mul_((self._limit / norm).clamp(max=1.0).nan_to_num(1.0)[:, None])
        grad[bad] = 0.0
        for i, (parameters, policy) in self._named.items():
            if not bad[i]:
                parameters["weights"].grad = grad[i]
                gradrein.clip_(parameters, policy)
