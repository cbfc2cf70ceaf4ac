"""Layer, RMS, group, instance and batch norms: scale and shift, from the normalised input that was saved."""

from collections.abc import Callable

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


def _scale_or_shift(ctx: RuleContext, shape: tuple[int, ...], normalise: Callable[[], Tensor]) -> SampleGrads:
    """Sum over what each sample owns: g for the shift, at position 2; g times a new normalised input for the scale."""
    if ctx.position not in (1, 2):
        raise NotSeparableError
    g = upcast_half(ctx.gradient)
    values = g if ctx.position == 2 else normalise().mul_(g)
    return Dense(ctx.layout.sums(values, shape).reshape(ctx.samples, *ctx.shape))


def layer_norm(ctx: RuleContext) -> SampleGrads:
    """One mean for each row."""
    return _scale_or_shift(
        ctx, ctx.shape, lambda: (upcast_half(ctx.saved("input")) - ctx.saved("result1")).mul_(ctx.saved("result2"))
    )


def rms_norm(ctx: RuleContext) -> SampleGrads:
    """No mean, and no shift."""
    return _scale_or_shift(ctx, ctx.shape, lambda: upcast_half(ctx.saved("input")) * ctx.saved("result1"))


def group_norm(ctx: RuleContext) -> SampleGrads:
    """One mean for each sample and group."""

    def normalise() -> Tensor:
        x = upcast_half(ctx.saved("input"))
        mean, rstd = ctx.saved("result1")[..., None], ctx.saved("result2")[..., None]
        normalised: Tensor = (x.reshape(len(x), ctx.saved("group"), -1) - mean).mul_(rstd)
        return normalised.view(x.shape)

    return _scale_or_shift(ctx, _channels(ctx), normalise)


def batch_norm(ctx: RuleContext) -> SampleGrads:
    """One mean for each channel: a stored one, or that of this batch."""

    def normalise() -> Tensor:
        if _is_training(without_suffix(ctx.op), getattr(ctx.node, "_saved_training", None)):
            mean, rstd = ctx.saved("result1"), ctx.saved("result2")
        else:
            mean = ctx.saved("running_mean")
            eps = ctx.saved("epsilon" if hasattr(ctx.node, "_saved_epsilon") else "eps")
            rstd = (ctx.saved("running_var") + eps).rsqrt()
        x, channels = upcast_half(ctx.saved("input")), _channels(ctx)
        return (x - upcast_half(mean).view(channels)) * upcast_half(rstd).view(channels)

    return _scale_or_shift(ctx, _channels(ctx), normalise)


def _channels(ctx: RuleContext) -> tuple[int, ...]:
    """Return the shape of the parameter that broadcasts over pixels."""
    return (ctx.shape[0],) + (1,) * (ctx.gradient.dim() - 2)


add_op("NativeLayerNorm", entry=OpEntry(owners_of_layer_norm, keeps={0: "input"}, rule=layer_norm))
add_op("FusedRmsNorm", entry=OpEntry(owners_of_layer_norm, keeps={0: "input"}, rule=rms_norm))
add_op("NativeGroupNorm", entry=OpEntry(by_groups, keeps={0: "input"}, rule=group_norm))
add_op(
    *("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNormLegit"),
    *("NativeBatchNormLegitNoTraining", "BatchNormWithUpdate", "BatchNormNoUpdate"),
    entry=OpEntry(owners_of_batch_norm, keeps={0: "input"}, rule=batch_norm),
)
