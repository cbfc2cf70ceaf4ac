"""The general way, right for every op: run its backward once per sample.

A backward is linear in the gradient it is given. Given only the part that one sample owns, it returns that
sample's gradient.
"""

import torch
from torch import Tensor

from ..representations.base import Computed, Dense, Piece
from ..representations.numerics import able_to_hold
from .context import Use


def one_by_one(use: Use) -> Piece:
    """Run the op once per sample, and once for a weighted sum that its dtype can hold."""

    def dense(part: slice) -> Tensor:
        numbers = range(*part.indices(use.samples))
        picks = torch.eye(use.samples, dtype=torch.float64)
        return torch.stack([use.run(use.scaled(picks[i])) for i in numbers])

    def weighted(weights: Tensor) -> Tensor:
        if any(able_to_hold(g, weights).dtype != g.dtype for g in held):
            return Computed(use.samples, use.shape, dense).weighted(weights)
        return use.run(use.scaled(weights))

    held = [g for g in use.gradients if g is not None]
    return Computed(use.samples, use.shape, dense, weighted, holds=held, how="one by one", needs_op=True)


def nothing(use: Use) -> Piece:
    """Return zeros: no loss depends on this use."""
    return Dense(torch.zeros(()).expand(use.samples, *use.shape))
