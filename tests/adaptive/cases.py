"""Every adaptive policy with its twin: one table for all tests."""

import math

import torch
import twins

import bridle

RULES = {
    "by_zscore": (bridle.by_zscore, twins.zscore),
    "by_quantile": (bridle.by_quantile, twins.quantile),
    "by_tracked_quantile": (bridle.by_tracked_quantile, twins.tracked_quantile),
    "by_median": (bridle.by_median, twins.median),
    "by_running_norm": (bridle.by_running_norm, twins.running_norm),
    "by_stable_norm": (bridle.by_stable_norm, twins.stable_norm),
}
"""Policies that limit a norm, and their twins."""

ALL = {name: make for name, (make, _) in RULES.items()} | {
    "by_element_spike": bridle.by_element_spike,
    "by_overshoot": bridle.by_overshoot,
    "skip_spikes": bridle.skip_spikes,
}
"""Everything with a memory."""

SETTINGS = {
    "by_zscore": [{}, {"z": 1.0, "decay": 0.9, "warmup": 5}, {"warmup": 0}],
    "by_quantile": [{}, {"q": 0.9, "window": 7}, {"q": 0.5, "warmup": 5}, {"q": 1.0}, {"q": 0.0, "window": 1}],
    "by_tracked_quantile": [{}, {"q": 0.9, "rate": 0.05}, {"warmup": 5}],
    "by_median": [{}, {"k": 1.0, "window": 6}, {"warmup": 0}],
    "by_running_norm": [{}, {"k": 1.5, "decay": 0.5, "warmup": 3}, {"warmup": 0}],
    "by_stable_norm": [{}, {"decay": 0.9, "square_decay": 0.99}, {"warmup": 4}],
}
BOUNDS = [{}, {"floor": 0.9}, {"ceiling": 1.1}, {"floor": 0.5, "ceiling": 3.0}]


def recorded(steps=160, seed=0):
    """Norms with a trend, noise, heavy tails, and the occasional zero, NaN and infinity."""
    rng = torch.Generator().manual_seed(seed)
    trend = torch.linspace(0.5, -0.5, steps)
    noise = 0.4 * torch.randn(steps, generator=rng, dtype=torch.float64)
    tail = (torch.rand(steps, generator=rng) < 0.08) * 5 * torch.rand(steps, generator=rng)
    norms = torch.exp(trend + noise + tail).tolist()
    for at, bad in ((3, 0.0), (31, math.nan), (32, math.inf), (90, math.nan), (91, 0.0), (120, 1e30)):
        norms[at] = bad
    return norms


def gradient(norm, device="cpu"):
    """A gradient of three elements with this norm."""
    direction = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    return (direction * norm).to(device)


def parameter(device="cpu"):
    return torch.nn.Parameter(torch.zeros(3, dtype=torch.float64, device=device))
