"""The weight of `nn.Bilinear`, which multiplies two inputs.

Legend: b sample, t row of a sample, i and j columns of the inputs, o column of the output.
"""

import torch
from torch import Tensor

from ..ownership.layout import NotSeparableError
from ..representations.base import Computed, SampleGrads
from ..representations.numerics import scale_rows, upcast_half
from .context import RuleContext
from .registry import rule

# How torch lines up (t, i), (o, i, j) and (t, j): dimensions to insert into each, and those to sum over.
_BILINEAR = {"expand1": (1, 3), "expand2": (0,), "expand3": (1, 2), "sumdim": (2, 3)}


@rule("TrilinearBackward0")
def trilinear(ctx: RuleContext) -> SampleGrads:
    """A product of three tensors, where it is that of a weight and two inputs."""
    if ctx.position != 1 or any(tuple(ctx.saved(name)) != dims for name, dims in _BILINEAR.items()):
        raise NotSeparableError
    width = ctx.shape[0]
    g, x, y = (upcast_half(ctx.layout.by_sample(t, width)) for t in (ctx.gradient, ctx.saved("i1"), ctx.saved("i3")))

    def dense(part: slice) -> Tensor:
        return torch.einsum("bto,bti,btj->boij", g[part], x[part], y[part])

    def weighted(weights: Tensor) -> Tensor:
        heavy = scale_rows(g, weights)
        return torch.einsum("bto,bti,btj->oij", heavy, x.to(heavy), y.to(heavy))

    return Computed(ctx.samples, ctx.shape, dense, weighted, held_tensors=(g, x, y))
