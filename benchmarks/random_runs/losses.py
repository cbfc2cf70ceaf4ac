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
        plain, power = _TABLES[meaning][next(iter(_TABLES[meaning]))], float(name.split()[-1])
        return lambda output, target, weight: (weight / weight.mean() * plain(output, target)).mean() ** power
    if "power" in name:
        exponent = float(name.split()[-1])
        single: Single = lambda output, target: _by_sample(_error(output, target).abs() ** exponent)  # noqa: E731
    elif name.startswith("raised"):
        single = lambda output, target: _per_class(output, target) ** float(name.split()[-1])  # noqa: E731
    else:
        single = _TABLES[meaning][name.removeprefix("weighted ").removeprefix("summed ")]
    if name.startswith("summed"):
        return lambda output, target, weight: single(output, target).sum()  # noqa: ARG005
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


def _values(of_error: Callable[[Tensor], Tensor]) -> Single:
    return lambda output, target: _by_sample(of_error(_error(output, target)))


def _binary(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none", pos_weight=torch.tensor(weight)).mean(1)


def _gaussian(output: Tensor, target: Tensor) -> Tensor:
    """Minus the log-likelihood; the variance is kept above exp(-4), so that it is not below zero."""
    mean, log = output[:, 0], F.softplus(output[:, 1] + 4) - 4
    return 0.5 * ((target - mean).square() * torch.exp(-log) + log + 4)


def _td(output: Tensor, target: Tensor, huber: bool = False) -> Tensor:
    """What a value of an action misses of its reward and of nine tenths of the best value after it."""
    value = output[:, 0].gather(1, target[:, :1].long()).squeeze(1)
    wanted = target[:, 1] + 0.9 * output[:, 1].amax(1).detach()
    return F.huber_loss(value, wanted, reduction="none") if huber else (value - wanted).square()


def _poisson(output: Tensor, target: Tensor) -> Tensor:
    """Half of the deviance."""
    log = output.squeeze(-1)
    return torch.exp(log) - target * log + torch.xlogy(target, target) - target


def _info_nce(output: Tensor, _target: Tensor) -> Tensor:
    first, second = F.normalize(output, dim=-1).unbind(1)
    return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)), reduction="none")


def _triplet(output: Tensor, _target: Tensor) -> Tensor:
    first, second = output.unbind(1)
    near, far = (first - second).square().sum(1), (first - second.roll(1, 0)).square().sum(1)
    return F.relu(near - far + 1) + 0.01 * (first.square().sum(1) + second.square().sum(1))


def _elbo(output: Tensor, target: Tensor) -> Tensor:
    given, mean, log = output.split((target.shape[1], 3, 3), 1)
    return (given - target).square().sum(1) + 0.5 * (mean.square() + torch.exp(log) - log - 1).sum(1)


def _margin(output: Tensor, target: Tensor) -> Tensor:
    right = output.gather(-1, target.unsqueeze(-1))
    others = output.scatter(-1, target.unsqueeze(-1), -1e9).amax(-1, keepdim=True)
    return _by_sample((1 + others - right).clamp_min(0).square().squeeze(-1))


def _poly(output: Tensor, target: Tensor) -> Tensor:
    each = _per_class(output, target)
    return each + 1 - torch.exp(-each)


def _generalized(output: Tensor, target: Tensor) -> Tensor:
    return (1 - torch.exp(-0.7 * _per_class(output, target))) / 0.7


def _modest(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, and a price for being sure."""
    logs = torch.log_softmax(output, -1)
    sure = (logs.exp() * logs).sum(-1) + math.log(output.shape[-1])
    return _per_class(output, target) + 0.1 * _by_sample(sure)


def _tukey(error: Tensor) -> Tensor:
    """Squares of small errors, and no more than a third for any."""
    return (1 - (1 - (error / 4).square()).clamp_min(0) ** 3) / 3


def _bradley_terry(output: Tensor, target: Tensor) -> Tensor:
    margin = output[:, 0, 0] - output[:, 1, 0]
    return F.binary_cross_entropy_with_logits(margin, target, reduction="none")


def _rank_hinge(output: Tensor, target: Tensor) -> Tensor:
    margin = (2 * target - 1) * (output[:, 0, 0] - output[:, 1, 0])
    return (1 - margin).clamp_min(0).square()


def _exponential(output: Tensor, target: Tensor) -> Tensor:
    """Half of the deviance of a constant hazard, the logarithm of which is the output."""
    log, time, ended = output.squeeze(-1), target[:, 0], target[:, 1]
    return torch.exp(log) * time - ended * (log + 1 + torch.log(time))


def _cosine(output: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(output, target, dim=-1)


def _angle(output: Tensor, target: Tensor) -> Tensor:
    return torch.acos(F.cosine_similarity(output, target, dim=-1).clamp(-0.9999, 0.9999)).square()


def _mixture(output: Tensor, target: Tensor) -> Tensor:
    """Minus the log-likelihood; the variances are kept above exp(-4), so that it is not below zero."""
    weight, mean, log = output.chunk(3, -1)
    log = F.softplus(log + 4) - 4
    each = -0.5 * ((target.unsqueeze(-1) - mean).square() * torch.exp(-log) + log + 4)
    return -torch.logsumexp(torch.log_softmax(weight, -1) + each, -1)


def _brier(output: Tensor, target: Tensor) -> Tensor:
    return _squared(torch.softmax(output, -1), target)


_TABLES: dict[str, dict[str, Single]] = {
    "values": {
        "mse": _values(torch.square),
        "l1": _values(torch.abs),
        "huber": _values(lambda error: F.huber_loss(error, torch.zeros_like(error), reduction="none")),
        "log-cosh": _log_cosh,
        "quantile": _quantile,
        "relative": lambda output, target: _by_sample((_error(output, target) / (target.abs() + 0.1)).square()),
        "linex": _values(lambda error: torch.exp(error / 4) - error / 4 - 1),
        "cauchy": _values(lambda error: torch.log1p(error.square())),
        "pseudo-huber": _values(lambda error: torch.sqrt(1 + error.square()) - 1),
        "asymmetric": _values(lambda error: torch.where(error < 0, 5 * error.square(), error.square())),
        "tukey": _values(_tukey),
    },
    "classes": {
        "cross-entropy": _per_class,
        "smoothed": lambda output, target: _per_class(output, target, 0.1),
        "focal": _focal,
        "hinge": _hinge,
        "squared": _squared,
        "sharp": lambda output, target: _per_class(4 * output, target),
        "brier": _brier,
        "margin": _margin,
        "poly": _poly,
        "generalized": _generalized,
        "modest": _modest,
    },
    "actions": {
        "reinforce": _reinforce,
        "reinforce with baseline": lambda output, reward: _reinforce(output, reward, baseline=True),
        "reinforce with entropy": lambda output, reward: _reinforce(output, reward, entropy=0.02),
        "expected": lambda output, reward: reward.amax(1) - (torch.softmax(output, 1) * reward).sum(1),
    },
    "binary": {"bce": _binary, "rare bce": lambda output, target: _binary(output, target, 10.0)},
    "spread": {"gaussian": _gaussian},
    "q": {"td": _td, "td huber": lambda output, target: _td(output, target, huber=True)},
    "counts": {"poisson": _poisson},
    "matching": {"info-nce": _info_nce, "triplet": _triplet},
    "codes": {"elbo": _elbo},
    "order": {"bradley-terry": _bradley_terry, "rank hinge": _rank_hinge},
    "lifetimes": {"exponential": _exponential},
    "directions": {"cosine": _cosine, "angle": _angle},
    "mixture": {"mixture": _mixture},
}
