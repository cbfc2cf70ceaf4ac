"""Losses of a task, of a batch: `loss(output, target, weight)`. Each is above zero, and lower is better."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Single = Callable[[Tensor, Tensor], Tensor]  # without weights, one value for each sample


def make_loss(name: str, meaning: str) -> Loss:
    """Return the loss of this name for outputs with this meaning; the commonest as people write them."""
    if name == "mse":
        squares = torch.nn.MSELoss()
        return lambda output, target, weight: squares(output.squeeze(-1), target)  # noqa: ARG005
    if name == "cross-entropy":
        entropy = torch.nn.CrossEntropyLoss()
        return lambda output, target, weight: entropy(output.flatten(0, -2), target.flatten())  # noqa: ARG005
    return _by_hand(name, meaning)


def hidden_loss(name: str, meaning: str) -> Loss:
    """Return the same loss on test data, by hand; for actions what is lost by not always taking the best."""
    if meaning != "actions":
        return _by_hand(name, meaning)
    return lambda output, reward, weight: _regret(output, reward)  # noqa: ARG005


def _by_hand(name: str, meaning: str) -> Loss:
    if name.startswith("batch power"):
        plain, power = _TABLES[meaning]["mse" if meaning == "values" else "cross-entropy"], float(name.split()[-1])
        return lambda output, target, weight: (weight / weight.mean() * plain(output, target)).mean() ** power
    if "power" in name:
        exponent = float(name.split()[-1])
        single: Single = lambda output, target: _error(output, target).abs() ** exponent  # noqa: E731
    else:
        single = _TABLES[meaning][name.removeprefix("weighted ")]
    if name.startswith("weighted"):
        return lambda output, target, weight: (weight * single(output, target)).mean()
    return lambda output, target, weight: single(output, target).mean()  # noqa: ARG005


def _regret(output: Tensor, reward: Tensor) -> Tensor:
    return (reward.max(1).values - (torch.softmax(output, 1) * reward).sum(1)).mean()


def _error(output: Tensor, target: Tensor) -> Tensor:
    return output.squeeze(-1) - target


def _per_class(output: Tensor, target: Tensor, smooth: float = 0.0) -> Tensor:
    each = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none", label_smoothing=smooth)
    return _by_sample(each.unflatten(0, target.shape))


def _by_sample(each: Tensor) -> Tensor:
    """Return one number for each sample: of letters the mean over a sequence."""
    return each.mean(1) if each.ndim > 1 else each


def _focal(output: Tensor, target: Tensor) -> Tensor:
    each = _per_class(output, target)
    return (1 - torch.exp(-each)) ** 2 * each


def _hinge(output: Tensor, target: Tensor) -> Tensor:
    right = output.gather(-1, target.unsqueeze(-1))
    return _by_sample((1 + output - right).clamp_min(0).sum(-1) - 1)


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return _by_sample((output - F.one_hot(target, output.shape[-1])).square().sum(-1))


def _reinforce(output: Tensor, reward: Tensor, baseline: bool = False, entropy: float = 0.0) -> Tensor:
    """Draw an action of each sample, and weigh its log-probability by its reward."""
    logs = torch.log_softmax(output, 1)
    action = torch.multinomial(logs.detach().exp().nan_to_num(1.0), 1)
    gained = reward.gather(1, action).squeeze(1)
    gained = gained - gained.mean() if baseline else gained
    return -gained * logs.gather(1, action).squeeze(1) + entropy * (logs.exp() * logs).sum(1)


def _quantile(output: Tensor, target: Tensor) -> Tensor:
    error = -_error(output, target)
    return torch.maximum(0.9 * error, -0.1 * error)


def _log_cosh(output: Tensor, target: Tensor) -> Tensor:
    error = _error(output, target)
    return error.abs() + F.softplus(-2 * error.abs()) - math.log(2)


_TABLES: dict[str, dict[str, Single]] = {
    "values": {
        "mse": lambda output, target: _error(output, target).square(),
        "l1": lambda output, target: _error(output, target).abs(),
        "huber": lambda output, target: F.huber_loss(output.squeeze(-1), target, reduction="none"),
        "log-cosh": _log_cosh,
        "quantile": _quantile,
    },
    "classes": {
        "cross-entropy": _per_class,
        "smoothed": lambda output, target: _per_class(output, target, 0.1),
        "focal": _focal,
        "hinge": _hinge,
        "squared": _squared,
    },
    "actions": {
        "reinforce": _reinforce,
        "reinforce with baseline": lambda output, reward: _reinforce(output, reward, baseline=True),
        "reinforce with entropy": lambda output, reward: _reinforce(output, reward, entropy=0.02),
    },
}
