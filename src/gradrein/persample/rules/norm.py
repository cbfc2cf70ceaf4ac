"""Layer, group, instance and batch norms: scale and shift, from the normalised input that was saved."""

from torch import Tensor

from ...errors import BatchCouplingError
from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from .context import RuleContext
from .registry import rule


def _scale_or_shift(ctx: RuleContext, normalised: Tensor | None, shape: tuple[int, ...]) -> SampleGrads:
    """Sum g, or g times the normalised input (which is overwritten), over what each sample owns."""
    g = upcast_half(ctx.gradient)
    values = g if normalised is None else normalised.mul_(g)
    return Dense(ctx.layout.sums(values, shape).reshape(ctx.samples, *ctx.shape))


def _only_scale_and_shift(ctx: RuleContext) -> None:
    if ctx.position not in (1, 2):
        raise NotSeparableError


@rule("NativeLayerNormBackward0")
def layer_norm(ctx: RuleContext) -> SampleGrads:
    """Scale at position 1, shift at position 2."""
    _only_scale_and_shift(ctx)
    if ctx.position == 2:
        return _scale_or_shift(ctx, None, ctx.shape)
    mean, rstd = ctx.saved("result1"), ctx.saved("result2")
    return _scale_or_shift(ctx, (upcast_half(ctx.saved("input")) - mean).mul_(rstd), ctx.shape)


@rule("NativeGroupNormBackward0")
def group_norm(ctx: RuleContext) -> SampleGrads:
    """Scale at position 1, shift at position 2; one mean per sample and group."""
    _only_scale_and_shift(ctx)
    channels = (ctx.shape[0],) + (1,) * (ctx.gradient.dim() - 2)
    if ctx.position == 2:
        return _scale_or_shift(ctx, None, channels)
    x, groups = upcast_half(ctx.saved("input")), ctx.saved("group")
    grouped = x.reshape(x.shape[0], groups, -1)
    mean, rstd = ctx.saved("result1")[..., None], ctx.saved("result2")[..., None]
    return _scale_or_shift(ctx, (grouped - mean).mul_(rstd).view(x.shape), channels)


@rule("NativeBatchNormBackward0")
def batch_norm(ctx: RuleContext) -> SampleGrads:
    """Scale at position 1, shift at position 2, with stored statistics or with those of this batch."""
    _only_scale_and_shift(ctx)
    x = ctx.saved("input")
    channels = (ctx.shape[0],) + (1,) * (x.dim() - 2)
    training = ctx.saved("training")
    alone = ctx.layout.is_whole_along(x[0].numel(), x.shape[0]) and ctx.layout.is_whole_along(1, x[0, 0].numel())
    if training and not alone and not ctx.allow_coupling:
        raise BatchCouplingError(
            f"per_sample: `{ctx.op}` normalises with the statistics of the batch, so every loss depends on "
            "every sample and one sample has no gradient of its own. Call model.eval(), or use GroupNorm; "
            "pass allow_coupling=True to get the gradient of each loss as it is.",
            ctx.op,
        )
    if ctx.position == 2:
        return _scale_or_shift(ctx, None, channels)
    if training:
        mean, rstd = ctx.saved("result1"), ctx.saved("result2")
    else:
        mean = ctx.saved("running_mean")
        rstd = (ctx.saved("running_var") + ctx.saved("eps")).rsqrt()
    centred = (upcast_half(x) - upcast_half(mean).view(channels)) * upcast_half(rstd).view(channels)
    return _scale_or_shift(ctx, centred, channels)
