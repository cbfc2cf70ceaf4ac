"""An audit: canaries that are in the data by the toss of a coin, and how well training gives them away."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from .._validate import count, number
from ..errors import ArgumentError
from ..persample import per_sample


@dataclass(frozen=True)
class Audit:
    """What an audit has found.

    Attributes:
        epsilon: training spends at least this much, with the confidence that was asked for.
        claim: what training says it spends.
        where: the parameter that gives most away, or "all parameters".
        guesses: how many of the guesses on which the bound rests were right, and how many there were.

    Examples:
        >>> gradrein.private.Audit(epsilon=3.2, claim=1.0, where="head.weight", guesses=(60, 60)).exceeded
        True

    See Also:
        [`gradrein.private.audit`][]
    """

    epsilon: float
    claim: float
    where: str
    guesses: tuple[int, int]

    @property
    def exceeded(self) -> bool:
        """Whether more is spent than is claimed: there is a fault."""
        return self.epsilon > self.claim


def audit(
    build: Callable[[Dataset[Any]], Any],
    losses: Callable[[Any, Any], Tensor],
    canaries: Dataset[Any],
    *,
    delta: float,
    epochs: int = 1,
    confidence: float = 0.95,
    seed: int = 0,
) -> Audit:
    """Train once on data with canaries, each in or out by the toss of a coin, and return how much this gives away.

    The auditor sees the parameters after every step. How far the steps go along the gradient of a canary is added up,
    for each parameter and for all. The canaries with the highest and lowest scores are guessed to be in and out. By
    how many guesses are right, epsilon is bounded from below (Steinke, Nasr and Jagielski 2023); the confidence covers
    everything that was looked at. A low bound proves nothing. One above the claim shows a fault.

    Args:
        build: makes the run for a dataset that is to be part of its data: a `Private`, or anything with `model`,
            `loader`, `step(losses)` and `epsilon()`.
        losses: the losses of a model on a batch, one for each sample.
        canaries: samples that are unlike the data and each other, such as noise with random labels: some hundreds.
        delta: that of the claim.
        epochs: how long to train.
        confidence: with which the bound holds.
        seed: of the coins.

    Raises:
        ArgumentError: there are fewer than ten canaries, or an argument has an invalid value.

    Examples:
        >>> def build(canaries):
        ...     torch.manual_seed(0)
        ...     data = torch.utils.data.TensorDataset(torch.zeros(50, 30), torch.zeros(50))
        ...     loader = torch.utils.data.DataLoader(torch.utils.data.ConcatDataset([data, canaries]), batch_size=10)
        ...     model = torch.nn.Linear(30, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     options = {"max_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-4, "seed": 0}
        ...     return gradrein.private.Private(model, optimizer, loader, **options)
        >>> canaries = torch.utils.data.TensorDataset(torch.randn(40, 30), torch.ones(40))
        >>> losses = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]) ** 2
        >>> gradrein.private.audit(build, losses, canaries, delta=1e-4).exceeded
        False

    See Also:
        [`gradrein.private.Private`][], [`gradrein.private.Audit`][]
    """
    total = count(len(canaries), "len(canaries)", 10)  # type: ignore[arg-type]
    if not 0 < number(confidence, "confidence", 0, 1) < 1:
        raise ArgumentError(f"`confidence` must be between 0 and 1; found {confidence:g}.")
    coins = torch.rand(total, generator=torch.Generator().manual_seed(seed)) < 0.5
    run = build(Subset(canaries, coins.nonzero().squeeze(1).tolist()))
    batch = default_collate([canaries[i] for i in range(total)])
    scores = _scores(run, lambda data: losses(run.model, data), batch, count(epochs, "epochs"))
    sizes = [r for r in (total, total // 2, total // 4, total // 8) if r >= 2]
    error = (1 - confidence) / (len(scores) * len(sizes))
    found = [Audit(0.0, run.epsilon(), "nothing", (0, 0))]
    for where, score in scores.items():
        order = score.argsort(descending=True)
        for half in (size // 2 for size in sizes):
            right = int(coins[order[:half]].sum() + (~coins[order[total - half :]]).sum())
            bound = _bound(total, 2 * half, right, delta, error)
            found.append(Audit(bound, found[0].claim, where, (right, 2 * half)))
    return max(found, key=lambda one: one.epsilon)


def _scores(run: Any, losses: Callable[[Any], Tensor], canaries: Any, epochs: int) -> dict[str, Tensor]:
    """Train, and return how far steps went along the gradient of each canary, over its norm, by parameter."""
    parameters = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    scores: dict[str, Any] = dict.fromkeys([*parameters, "all parameters"], 0.0)
    for _ in range(epochs):
        ps = None
        for batch in run.loader:
            if ps is None:
                before = {name: p.detach().clone() for name, p in parameters.items()}
                ps = per_sample(losses(canaries), parameters)
            if run.step(losses(batch)):
                for name, p in parameters.items():
                    along = ps.dot({name: before[name] - p.detach()}) / ps.norms().clamp(min=1e-12)
                    scores[name], scores["all parameters"] = scores[name] + along, scores["all parameters"] + along
                ps = None
    return scores


def _bound(canaries: int, guesses: int, right: int, delta: float, error: float) -> float:
    """Return the largest epsilon at which so many right guesses are less likely than the error allows."""
    low, high = 0.0, 20.0
    if _chance(canaries, guesses, right, low, delta) > error:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(canaries, guesses, right, middle, delta) <= error else (low, middle)
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return how likely so many right guesses are, at most, under this epsilon and delta."""
    logs = torch.lgamma(torch.arange(1, guesses + 2, dtype=torch.float64))
    hits = torch.arange(guesses + 1, dtype=torch.float64)
    log_p, log_q = -math.log1p(math.exp(-epsilon)), -math.log1p(math.exp(epsilon))
    each = (logs[-1] - logs - logs.flip(0) + hits * log_p + (guesses - hits) * log_q).exp()
    at_least = each.flip(0).cumsum(0).flip(0)
    tail = float(at_least[right])
    fewer = at_least[:right].flip(0) - tail  # at least `right - i`, and fewer than `right`
    alpha = float((fewer / torch.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, tail + 2 * canaries * delta * alpha)
