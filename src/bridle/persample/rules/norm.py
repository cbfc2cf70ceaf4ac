"""Layer, group, instance and batch norms: scale and shift, from the normalised input that was saved."""

from torch import Tensor

from ...errors import BatchCouplingError
from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, Piece
from ..representations.numerics import wide
from .context import Use


def _scale_or_shift(use: Use, normalised: Tensor | None, shape: tuple[int, ...]) -> Piece:
    """Sum g, or g times the normalised input (which is overwritten), over what each sample owns."""
    g = wide(use.gradient)
    values = g if normalised is None else normalised.mul_(g)
    return Dense(use.layout.sums(values, shape).reshape(use.samples, *use.shape))


def _only_scale_and_shift(use: Use) -> None:
    if use.position not in (1, 2):
        raise NotSeparableError


def layer_norm(use: Use) -> Piece:
    """Scale at position 1, shift at position 2."""
    _only_scale_and_shift(use)
    if use.position == 2:
        return _scale_or_shift(use, None, use.shape)
    mean, rstd = use.saved("result1"), use.saved("result2")
    return _scale_or_shift(use, (wide(use.saved("input")) - mean).mul_(rstd), use.shape)


def group_norm(use: Use) -> Piece:
    """Scale at position 1, shift at position 2; one mean per sample and group."""
    _only_scale_and_shift(use)
    channels = (use.shape[0],) + (1,) * (use.gradient.dim() - 2)
    if use.position == 2:
        return _scale_or_shift(use, None, channels)
    x, groups = wide(use.saved("input")), use.saved("group")
    grouped = x.reshape(x.shape[0], groups, -1)
    mean, rstd = use.saved("result1")[..., None], use.saved("result2")[..., None]
    return _scale_or_shift(use, (grouped - mean).mul_(rstd).view(x.shape), channels)


def batch_norm(use: Use) -> Piece:
    """Scale at position 1, shift at position 2, with stored statistics or with those of this batch."""
    _only_scale_and_shift(use)
    x = use.saved("input")
    channels = (use.shape[0],) + (1,) * (x.dim() - 2)
    training = use.saved("training")
    alone = use.layout.is_whole_along(x[0].numel(), x.shape[0]) and use.layout.is_whole_along(1, x[0, 0].numel())
    if training and not alone and not use.allow_coupling:
        raise BatchCouplingError(
            f"per_sample: `{use.op}` normalises with the statistics of the batch, so every loss depends on "
            "every sample and one sample has no gradient of its own. Call model.eval(), or use GroupNorm; "
            "pass allow_coupling=True to get the gradient of each loss as it is.",
            use.op,
        )
    if use.position == 2:
        return _scale_or_shift(use, None, channels)
    if training:
        mean, rstd = use.saved("result1"), use.saved("result2")
    else:
        mean = use.saved("running_mean")
        rstd = (use.saved("running_var") + use.saved("eps")).rsqrt()
    centred = (wide(x) - wide(mean).view(channels)) * wide(rstd).view(channels)
    return _scale_or_shift(use, centred, channels)
