"""The general way, right for every op: run its backward once per sample.

A backward is linear in the gradient it is given. Given only the part that one sample owns, it returns that
sample's gradient.
"""

import torch
from torch import Tensor

from ..representations.base import Computed, Dense, SampleGrads
from ..representations.numerics import widen_for
from .context import RuleContext


def one_by_one(ctx: RuleContext) -> SampleGrads:
    """Run the op once per sample, and once for a weighted sum that its dtype can hold."""

    def dense(part: slice) -> Tensor:
        numbers = range(*part.indices(ctx.samples))
        picks = torch.eye(ctx.samples, dtype=torch.float64, device="cpu")
        return torch.stack([ctx.run(ctx.scaled(picks[i])) for i in numbers])

    def weighted(weights: Tensor) -> Tensor:
        if any(widen_for(g, weights).dtype != g.dtype for g in held):
            return Computed(ctx.samples, ctx.shape, dense).weighted(weights)
        return ctx.run(ctx.scaled(weights))

    held = [g for g in ctx.gradients if g is not None]
    return Computed(ctx.samples, ctx.shape, dense, weighted, held_tensors=held, strategy="one by one", runs_op=True)


def nothing(ctx: RuleContext) -> SampleGrads:
    """Return zeros: no loss depends on this use."""
    return Dense(ctx.zeros().expand(ctx.samples, *ctx.shape))
