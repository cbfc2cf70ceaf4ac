"""Convolution weights, held as inputs and output gradients.

Legend: b sample, k image of a sample (nearly always one), c and o channels, p output pixel.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import ALL, SampleGrads, in_chunks
from .gram_cache import GramCache
from .numerics import scale_rows, upcast_half
from .outer import TRAFFIC, Outer


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
        """Fold the samples into groups, so that one ordinary call gives each sample its own weight."""
        g, x = self.g[part], self.x[part]
        n = len(g)
        if self._many_channels():
            return torch.stack([self._weight_gradient(one_g, one_x, 1) for one_g, one_x in zip(g, x, strict=True)])
        out = g.new_empty(n, *self.shape)
        if not n:
            return out
        for few in in_chunks(n, prod(self.shape) + g[0].numel() + x[0].numel()):  # more at once is slower as well
            folded_g, folded_x = (values[few].transpose(0, 1).flatten(1, 2) for values in (g, x))
            out[few] = self._weight_gradient(folded_g, folded_x, len(g[few])).view(-1, *self.shape)
        return out

    def squared_norms(self, grams: GramCache | None = None) -> Tensor:  # noqa: ARG002
        if self.strategy != "gram":
            return super().squared_norms()
        unfolded = self.pixels * prod(self.shape[1:])
        return torch.cat([self._as_outer(part).squared_norms() for part in in_chunks(self.samples, unfolded)])

    def weighted(self, weights: Tensor) -> Tensor:
        g = scale_rows(self.g, weights)
        return self._weight_gradient(g.flatten(0, 1), self.x.flatten(0, 1).to(g), 1)

    def _weight_gradient(self, g: Tensor, x: Tensor, folds: int) -> Tensor:
        o = self.options
        weight = g.new_empty(()).expand(folds * self.shape[0], *self.shape[1:])
        answer: Tensor = torch.ops.aten.convolution_backward(
            g,
            x,
            weight,
            None,
            o["stride"],
            o["padding"],
            o["dilation"],
            o["transposed"],
            o["output_padding"],
            o["groups"] * folds,
            [False, True, False],
        )[1]
        return answer

    def _many_channels(self) -> bool:
        """Return whether one call per sample beats folding: grouped kernels are poor at wide groups."""
        return self.options["groups"] == 1 and self.shape[0] * self.shape[1] >= 128 * 128

    def _gram_is_cheaper(self) -> bool:
        """Compare pixels x pixels products of unfolded images with the weight itself."""
        plain: bool = self.options["groups"] == 1 and not self.options["transposed"] and len(self.shape) in (3, 4)
        if not plain or self.g.shape[1] != 1:
            return False
        o, side = self.shape[0], prod(self.shape[1:])
        gram = self.pixels**2 * (o + side + 2 * TRAFFIC) + 2 * TRAFFIC * self.pixels * side
        return gram < self.pixels * o * side

    def _as_outer(self, part: slice) -> Outer:
        x, g, o = self.x[part, 0], self.g[part, 0], self.options
        if len(self.shape) == 3:  # a row of pixels is an image of height one
            x, g = x.unsqueeze(2), g.unsqueeze(2)
        kernel, stride, padding, dilation = (
            (*((fill,) if len(self.shape) == 3 else ()), *values)
            for fill, values in (
                (1, self.shape[2:]),
                (1, o["stride"]),
                (0, o["padding"]),
                (1, o["dilation"]),
            )
        )
        columns = F.unfold(x, kernel, dilation, padding, stride)
        return Outer(g.flatten(2).transpose(1, 2), columns.transpose(1, 2), strategy="gram")
