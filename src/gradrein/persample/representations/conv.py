"""Convolution weights, held as inputs and output gradients.

Legend: b sample, k image of a sample (nearly always one), c and o channels, p output pixel.
"""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tracing import as_one_op
from .base import ALL, TRAFFIC, SampleGrads, in_chunks, norms_of_squares
from .numerics import gram_error_bound, gram_sums, scale_rows, upcast_half

OPTIONS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
# Larger blocks are had from the system anew each time, which costs more than a Gram matrix.
_STORED_BYTES = 1 << 25
# In a convolution with a group for each sample, so many products of channels are a wide group, and fewer channels than
# this a narrow one.
_WIDE, _NARROW = 128 * 64, 8
_ARGUMENTS = (
    "Tensor g, Tensor x, int[] shape, "
    "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
)


class Convolved(SampleGrads):
    """Gradients of a convolution's weight, held as its input and the gradient at its output."""

    def __init__(self, g: Tensor, x: Tensor, options: Sequence[Any], shape: Sequence[int]) -> None:
        """Hold the gradient at the output and the input, (samples, images, channels, *pixels) each, and `OPTIONS`."""
        self.g, self.x, self.options = upcast_half(g), upcast_half(x), tuple(options)
        self.samples, self.shape = len(g), tuple(shape)
        self.pixels: int = g.shape[1] * prod(g.shape[3:])
        self.strategy = "gram" if self._gram_is_cheaper() else "streamed"
        self.held_tensors = (self.g, self.x)
        self.flops_saved = 0.0 if self.strategy == "gram" else float(self.samples * self.pixels * prod(self.shape))

    def dense(self, part: slice = ALL) -> Tensor:
        made = as_one_op(weight_gradients, _empty_gradients, _ARGUMENTS)
        return made(self.g[part], self.x[part], self.shape, *self.options)

    def norms(self) -> Tensor:
        if self.strategy != "gram":
            return super().norms()
        made = as_one_op(convolution_gram_sums, _empty_sums, _ARGUMENTS)
        squares, bound, largest = made(self.g, self.x, self.shape, *self.options).unbind()
        sizes = self.pixels, self.shape[0], prod(self.shape[1:])
        return norms_of_squares(self, squares, gram_error_bound(squares, bound, largest, sizes, (self.g, self.x)))

    def weighted(self, weights: Tensor) -> Tensor:
        g = scale_rows(self.g, weights)
        return _weight_gradient(g.flatten(0, 1), self.x.flatten(0, 1).to(g), self.shape, *self.options)

    def _gram_is_cheaper(self) -> bool:
        """Compare pixels x pixels products of unfolded images with the weight itself."""
        if not self.g.is_cpu or not _has_columns(self.g, self.options):
            return False
        o, side = self.shape[0], prod(self.shape[1:])
        gram = self.pixels**2 * (o + side + 2 * TRAFFIC) + 2 * TRAFFIC * self.pixels * side
        # Written down, one product serves the norm and the sum after it, and is then read twice.
        stored = 3 * TRAFFIC * o * side if self.nbytes() <= _STORED_BYTES else inf
        return gram < min(self.pixels * o * side, stored)


def weight_gradients(g: Tensor, x: Tensor, shape: Sequence[int], *options: Any) -> Tensor:
    """Return the gradient of each sample: (samples, *shape).

    Samples are folded into groups, so that one ordinary call gives each of them its own weight. Where the kernels for
    groups are poor, images are unfolded instead.

    Args:
        g: gradients at the output, (samples, images, channels, *pixels).
        x: inputs, likewise.
        shape: that of the weight.
        options: those of the convolution.
    """
    out = g.new_empty(len(g), *shape)
    if not len(g):
        return out
    if _has_columns(g, options) and _columns_are_faster(shape):
        return _write_from_columns(g[:, 0], x[:, 0], out, options)
    for few in in_chunks(len(g), prod(shape) + g[0].numel() + x[0].numel()):  # more at once is slower as well
        folded_g, folded_x = (values[few].transpose(0, 1).flatten(1, 2) for values in (g, x))
        folded = (len(g[few]) * shape[0], *shape[1:])
        *others, groups = options
        out[few] = _weight_gradient(folded_g, folded_x, folded, *others, groups * len(g[few])).view(-1, *shape)
    return out


def convolution_gram_sums(g: Tensor, x: Tensor, shape: Sequence[int], *options: Any) -> Tensor:
    """Return squared norms made from Gram matrices of unfolded images, and what their error follows from.

    Takes what `weight_gradients` does, and returns what `gram_sums` does, as one tensor.
    """
    unfolded = prod(g.shape[1:]) // shape[0] * prod(shape[1:])
    parts = []
    for few in in_chunks(len(g), unfolded):
        left, right = _unfolded(g[few, 0], x[few, 0], shape, options)
        parts.append(torch.stack(gram_sums(left.transpose(1, 2), right.transpose(1, 2))))
    return torch.cat(parts, 1)


def _weight_gradient(g: Tensor, x: Tensor, shape: Sequence[int], *options: Any) -> Tensor:
    weight = g.new_empty(()).expand(tuple(shape))
    backward = torch.ops.aten.convolution_backward
    gradient: Tensor = backward(g, x, weight, None, *options, [False, True, False])[1]
    return gradient


def _has_columns(g: Tensor, options: Sequence[Any]) -> bool:
    """Return whether the gradient is a product with the columns of one unfolded image for each sample."""
    *_, transposed, _, groups = options
    return bool(groups == 1 and not transposed and g.shape[1] == 1 and not g.is_complex())


def _columns_are_faster(shape: Sequence[int]) -> bool:
    """Return whether one product of unfolded images is faster than a convolution with a group for each sample.

    The kernels for groups are poor where a group is wide, or has channels that do not fill a register. Those of 1 x 1
    convolutions unfold nothing.
    """
    return shape[1] < _NARROW or prod(shape[2:]) == 1 or prod(shape[:2]) >= _WIDE


def _write_from_columns(g: Tensor, x: Tensor, out: Tensor, options: Sequence[Any]) -> Tensor:
    shape = out.shape[1:]
    side = prod(shape[1:])
    matrices = out.view(len(g), shape[0], side)
    for few in in_chunks(len(g), prod(g.shape[2:]) * side):
        left, right = _unfolded(g[few], x[few], shape, options)
        if side <= shape[0]:  # the short side first is faster
            matrices[few] = torch.bmm(right, left.transpose(1, 2)).transpose(1, 2)
        else:
            torch.bmm(left, right.transpose(1, 2), out=matrices[few])
    return out


def _unfolded(g: Tensor, x: Tensor, shape: Sequence[int], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the two factors, (sample, side, pixel), whose products over pixels are the gradient.

    `torch.nn.functional.unfold` makes the same columns, one number at a time; a strided copy takes rows of them.
    """
    kernel, pixels = shape[2:], g.shape[2:]
    stride, padding, dilation = (tuple(x) * (len(kernel) if len(x) == 1 else 1) for x in options[:3])
    if any(padding):
        x = F.pad(x, [n for size in reversed(padding) for n in (size, size)])
    sample, channel, *steps = x.stride()
    inside = [step * n for step, n in zip(steps, dilation, strict=True)]
    across = [step * n for step, n in zip(steps, stride, strict=True)]
    windows = x.as_strided((*x.shape[:2], *kernel, *pixels), (sample, channel, *inside, *across))
    return g.flatten(2), windows.reshape(len(x), prod(shape[1:]), prod(pixels))


def _empty_gradients(g: Tensor, _: Tensor, shape: Sequence[int], *__: Any) -> Tensor:
    return g.new_empty(len(g), *shape)


def _empty_sums(g: Tensor, *_: Any) -> Tensor:
    return g.new_empty(3, len(g), dtype=torch.float64)
