"""Every adaptive policy with its twin: one table for all tests."""

import math

import reference_impl
import torch

import gradrein

RULES = {
    "ByZScore": (gradrein.policies.ByZScore, reference_impl.zscore),
    "ByQuantile": (gradrein.policies.ByQuantile, reference_impl.quantile),
    "ByMedian": (gradrein.policies.ByMedian, reference_impl.median),
    "ByRunningNorm": (gradrein.policies.ByRunningNorm, reference_impl.running_norm),
}
"""Policies that limit a norm, and their reference_impl."""

ALL = {name: make for name, (make, _) in RULES.items()} | {
    "ByOvershoot": gradrein.policies.ByOvershoot,
    "SkipSpikes": gradrein.policies.SkipSpikes,
}
"""Everything with a memory."""

SETTINGS = {
    "ByZScore": [{}, {"z": 1.0, "decay": 0.9, "warmup": 5}, {"warmup": 0}],
    "ByQuantile": [{}, {"q": 0.9, "window": 7}, {"q": 0.5, "warmup": 5}, {"q": 1.0}, {"q": 0.0, "window": 1}],
    "ByMedian": [{}, {"k": 1.0, "window": 6}, {"warmup": 0}],
    "ByRunningNorm": [{}, {"k": 1.5, "decay": 0.5, "warmup": 3}, {"warmup": 0}],
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
