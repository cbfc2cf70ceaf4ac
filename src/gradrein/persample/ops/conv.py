"""Convolutions of every kind: any dimension, groups, stride, dilation, padding, transposed or not.

Legend: b sample, k image of a sample (nearly always one), c and o channels, p output pixel.
"""

from torch import Tensor

from ..layout import NotSeparableError, Owners
from ..representations.base import Dense, SampleGrads
from ..representations.conv import OPTIONS, Convolved
from ..representations.numerics import upcast_half
from .rules import RuleContext
from .table import OpEntry, Step, add_op


def by_groups(step: Step) -> Owners:
    """Channels of one group and their pixels mix; weights get everything."""
    groups = step.value("groups") or step.value("group")
    if step.position or not groups or len(step.shape) != len(step.out.shape) or len(step.shape) < 2:
        return step.mixed()
    images, channels, *pixels = step.out.shape
    apart = step.out.reshaped((images, groups, channels // groups, *pixels)).mixed(range(2, 3 + len(pixels)))
    given = (images, groups, step.shape[1] // groups, *step.shape[2:])
    return Owners(apart.ids, given).reshaped(step.shape)


def convolution(ctx: RuleContext) -> SampleGrads:
    """Weight at position 1, bias at position 2."""
    if ctx.position == 0:
        raise NotSeparableError
    if ctx.position == 2:
        channels = (ctx.shape[0],) + (1,) * (ctx.gradient.dim() - 2)
        return Dense(ctx.layout.sums(upcast_half(ctx.gradient), channels).reshape(ctx.samples, *ctx.shape))
    options = [ctx.saved(name) for name in OPTIONS]
    return Convolved(_by_sample(ctx, ctx.gradient), _by_sample(ctx, ctx.saved("input")), options, ctx.shape)


def _by_sample(ctx: RuleContext, images: Tensor) -> Tensor:
    rows = ctx.layout.by_sample(images.flatten(1), ctx.gradient[0].numel())
    return rows.reshape(ctx.samples, -1, *images.shape[1:])


# What layers and functions of torch record; ops of one library, called directly, have no entry.
add_op("Convolution", "ConvolutionOverrideable", entry=OpEntry(by_groups, keeps={0: "input"}, rule=convolution))
