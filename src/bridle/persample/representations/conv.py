"""Convolution weights, held as inputs and output gradients.

Legend: b sample, k image of a sample (nearly always one), c and o channels, p output pixel.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tracing import as_one_op
from .base import ALL, SampleGrads, in_chunks, redo_where_lost
from .gram_cache import GramCache
from .numerics import scale_rows, upcast_half
from .outer import TRAFFIC, gram_doubt, gram_sums

OPTIONS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_ARGUMENTS = (
    "Tensor g, Tensor x, int[] shape, "
    "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
)


class Convolved(SampleGrads):
    """Gradients of a convolution's weight, held as its input and the gradient at its output."""

    def __init__(self, g: Tensor, x: Tensor, options: Mapping[str, Any], shape: Sequence[int]) -> None:
        """Hold the gradient at the output and the input, (samples, images, channels, *pixels) each."""
        self.g, self.x, self.options = upcast_half(g), upcast_half(x), options
        self.samples, self.shape = len(g), tuple(shape)
        self.pixels: int = g.shape[1] * prod(g.shape[3:])
        self.strategy = "gram" if self._gram_is_cheaper() else "streamed"
        self.held_tensors = (self.g, self.x)
        self.flops_saved = 0.0 if self.strategy == "gram" else float(self.samples * self.pixels * prod(self.shape))

    def dense(self, part: slice = ALL) -> Tensor:
        made = as_one_op(weight_gradients, _form_of_gradients, _ARGUMENTS)
        return made(self.g[part], self.x[part], *self._settings)

    def squared_norms(self, grams: GramCache | None = None) -> Tensor:  # noqa: ARG002
        if self.strategy != "gram":
            return super().squared_norms()
        made = as_one_op(convolution_gram_sums, _form_of_sums, _ARGUMENTS)
        squares, bound, largest = made(self.g, self.x, *self._settings).unbind()
        sizes = self.pixels, self.shape[0], prod(self.shape[1:])
        return redo_where_lost(self, squares, gram_doubt(squares, bound, largest, sizes, (self.g, self.x)))

    def weighted(self, weights: Tensor) -> Tensor:
        g = scale_rows(self.g, weights)
        return _weight_gradient(g.flatten(0, 1), self.x.flatten(0, 1).to(g), *self._settings)

    @property
    def _settings(self) -> tuple[Any, ...]:
        return self.shape, *(self.options[name] for name in OPTIONS)

    def _gram_is_cheaper(self) -> bool:
        """Compare pixels x pixels products of unfolded images with the weight itself."""
        plain: bool = self.options["groups"] == 1 and not self.options["transposed"] and len(self.shape) in (3, 4)
        if not plain or self.g.shape[1] != 1:
            return False
        o, side = self.shape[0], prod(self.shape[1:])
        gram = self.pixels**2 * (o + side + 2 * TRAFFIC) + 2 * TRAFFIC * self.pixels * side
        return gram < self.pixels * o * side


def weight_gradients(g: Tensor, x: Tensor, shape: Sequence[int], *options: Any) -> Tensor:
    """Return the gradient of each sample: (samples, *shape).

    Samples are folded into groups, so that one ordinary call gives each of them its own weight.

    Args:
        g: gradients at the output, (samples, images, channels, *pixels).
        x: inputs, likewise.
        shape: that of the weight.
        options: those of the convolution.
    """
    out = g.new_empty(len(g), *shape)
    if options[-1] == 1 and shape[0] * shape[1] >= 128 * 128:  # grouped kernels are poor at wide groups
        for one, one_g, one_x in zip(out, g, x, strict=True):
            one.copy_(_weight_gradient(one_g, one_x, shape, *options))
        return out
    if not len(g):
        return out
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
        parts.append(torch.stack(gram_sums(left, right)))
    return torch.cat(parts, 1)


def _weight_gradient(g: Tensor, x: Tensor, shape: Sequence[int], *options: Any) -> Tensor:
    weight = g.new_empty(()).expand(tuple(shape))
    backward = torch.ops.aten.convolution_backward
    found: Tensor = backward(g, x, weight, None, *options, [False, True, False])[1]
    return found


def _unfolded(g: Tensor, x: Tensor, shape: Sequence[int], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the two factors whose outer products over pixels are the gradient."""
    stride, padding, dilation, *_ = options
    kernel = tuple(shape[2:])
    if len(shape) == 3:  # a row of pixels is an image of height one
        x, g = x.unsqueeze(2), g.unsqueeze(2)
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    columns = F.unfold(x, kernel, dilation, padding, stride)
    return g.flatten(2).transpose(1, 2), columns.transpose(1, 2)


def _form_of_gradients(g: Tensor, _: Tensor, shape: Sequence[int], *__: Any) -> Tensor:
    return g.new_empty(len(g), *shape)


def _form_of_sums(g: Tensor, *_: Any) -> Tensor:
    return g.new_empty(3, len(g), dtype=torch.float64)
