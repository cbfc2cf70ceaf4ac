"""Convolutions of every kind: any dimension, groups, stride, dilation, padding, transposed or not.

Legend: b sample, k image of a sample (nearly always one), c and o channels, p output pixel.
"""

from torch import Tensor

from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, Piece
from ..representations.conv import Convolved
from ..representations.numerics import wide
from .context import Use

_OPTIONS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def convolution(use: Use) -> Piece:
    """Weight at position 1, bias at position 2."""
    if use.position == 0:
        raise NotSeparableError
    if use.position == 2:
        channels = (use.shape[0],) + (1,) * (use.gradient.dim() - 2)
        return Dense(use.layout.sums(wide(use.gradient), channels).reshape(use.samples, *use.shape))
    options = {name: use.saved(name) for name in _OPTIONS}
    return Convolved(_by_sample(use, use.gradient), _by_sample(use, use.saved("input")), options, use.shape)


def _by_sample(use: Use, images: Tensor) -> Tensor:
    rows = use.layout.by_sample(images.flatten(1), use.gradient[0].numel())
    return rows.reshape(use.samples, -1, *images.shape[1:])
