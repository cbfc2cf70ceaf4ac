"""Layer, RMS, group, instance and batch norms: scale and shift, from the normalised input that was saved."""

from torch import Tensor

from ..layout import NotSeparableError, Owners
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from .conv import by_groups
from .rules import RuleContext
from .table import OpEntry, Step, add_op, base_name, without_suffix

# Names of batch norms that do not say whether they are in training.
_WITH_STORED_STATISTICS = frozenset({"NativeBatchNormLegitNoTraining", "BatchNormNoUpdate"})


def owners_of_layer_norm(step: Step) -> Owners:
    """Elements mix along the dimensions that are normalised."""
    if step.position:
        return step.out.summed_to(step.shape)
    return step.out.mixed(range(-len(step.value("normalized_shape")), 0))


def owners_of_batch_norm(step: Step) -> Owners:
    """In training everything mixes that has one index in the second dimension; with stored statistics nothing does."""
    by_channel = step.out.mixed(d for d in range(len(step.out.shape)) if d != 1)
    if step.position:
        return Owners(by_channel.ids.reshape(-1), step.shape)
    return by_channel if _is_training(base_name(step.node), step.value("training")) else step.out


def _is_training(name: str, saved: bool | None) -> bool:
    """Return whether a batch norm uses the statistics of the batch: it says so, or has a name of its own."""
    return name not in _WITH_STORED_STATISTICS and saved is not False


def _scale_or_shift(ctx: RuleContext, normalised: Tensor | None, shape: tuple[int, ...]) -> SampleGrads:
    """Sum g, or g times the normalised input (which is overwritten), over what each sample owns."""
    g = upcast_half(ctx.gradient)
    values = g if normalised is None else normalised.mul_(g)
    return Dense(ctx.layout.sums(values, shape).reshape(ctx.samples, *ctx.shape))


def _only_scale_and_shift(ctx: RuleContext) -> None:
    if ctx.position not in (1, 2):
        raise NotSeparableError


def layer_norm(ctx: RuleContext) -> SampleGrads:
    """Scale at position 1, shift at position 2."""
    _only_scale_and_shift(ctx)
    if ctx.position == 2:
        return _scale_or_shift(ctx, None, ctx.shape)
    mean, rstd = ctx.saved("result1"), ctx.saved("result2")
    return _scale_or_shift(ctx, (upcast_half(ctx.saved("input")) - mean).mul_(rstd), ctx.shape)


def rms_norm(ctx: RuleContext) -> SampleGrads:
    """Scale at position 1."""
    if ctx.position != 1:
        raise NotSeparableError
    return _scale_or_shift(ctx, upcast_half(ctx.saved("input")) * ctx.saved("result1"), ctx.shape)


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


def batch_norm(ctx: RuleContext) -> SampleGrads:
    """Scale at position 1, shift at position 2, with stored statistics or with those of this batch."""
    _only_scale_and_shift(ctx)
    x = ctx.saved("input")
    channels = (ctx.shape[0],) + (1,) * (x.dim() - 2)
    training = _is_training(without_suffix(ctx.op), getattr(ctx.node, "_saved_training", None))
    if ctx.position == 2:
        return _scale_or_shift(ctx, None, channels)
    if training:
        mean, rstd = ctx.saved("result1"), ctx.saved("result2")
    else:
        mean = ctx.saved("running_mean")
        eps = ctx.saved("epsilon" if hasattr(ctx.node, "_saved_epsilon") else "eps")
        rstd = (ctx.saved("running_var") + eps).rsqrt()
    centred = (upcast_half(x) - upcast_half(mean).view(channels)) * upcast_half(rstd).view(channels)
    return _scale_or_shift(ctx, centred, channels)


add_op("NativeLayerNorm", entry=OpEntry(owners_of_layer_norm, keeps={0: "input"}, rule=layer_norm))
add_op("FusedRmsNorm", entry=OpEntry(owners_of_layer_norm, keeps={0: "input"}, rule=rms_norm))
add_op("NativeGroupNorm", entry=OpEntry(by_groups, keeps={0: "input"}, rule=group_norm))
add_op(
    *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNormLegit"),
    *("NativeBatchNormLegitNoTraining", "BatchNormWithUpdate", "BatchNormNoUpdate"),
    entry=OpEntry(owners_of_batch_norm, keeps={0: "input"}, rule=batch_norm),
)
