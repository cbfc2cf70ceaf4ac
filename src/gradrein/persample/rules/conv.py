"""Convolutions of every kind: any dimension, groups, stride, dilation, padding, transposed or not.

Legend: b sample, k image of a sample (nearly always one), c and o channels, p output pixel.
"""

from torch import Tensor

from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, SampleGrads
from ..representations.conv import OPTIONS, Convolved
from ..representations.numerics import upcast_half
from .context import RuleContext
from .registry import rule


@rule("ConvolutionBackward0")
def convolution(ctx: RuleContext) -> SampleGrads:
    """Weight at position 1, bias at position 2."""
    if ctx.position == 0:
        raise NotSeparableError
    if ctx.position == 2:
        channels = (ctx.shape[0],) + (1,) * (ctx.gradient.dim() - 2)
        return Dense(ctx.layout.sums(upcast_half(ctx.gradient), channels).reshape(ctx.samples, *ctx.shape))
    options = {name: ctx.saved(name) for name in OPTIONS}
    return Convolved(_by_sample(ctx, ctx.gradient), _by_sample(ctx, ctx.saved("input")), options, ctx.shape)


def _by_sample(ctx: RuleContext, images: Tensor) -> Tensor:
    rows = ctx.layout.by_sample(images.flatten(1), ctx.gradient[0].numel())
    return rows.reshape(ctx.samples, -1, *images.shape[1:])
