"""The weight of `nn.Bilinear`, which multiplies two inputs.

Legend: b sample, t row of a sample, i and j columns of the inputs, o column of the output.
"""

import torch
from torch import Tensor

from ..ownership.layout import NotSeparableError
from ..representations.base import Computed, Piece
from ..representations.numerics import weighed, wide
from .context import Use

# How torch lines up (t, i), (o, i, j) and (t, j): dimensions to insert into each, and those to sum over.
_BILINEAR = {"expand1": (1, 3), "expand2": (0,), "expand3": (1, 2), "sumdim": (2, 3)}


def trilinear(use: Use) -> Piece:
    """A product of three tensors, where it is that of a weight and two inputs."""
    if use.position != 1 or any(tuple(use.saved(name)) != dims for name, dims in _BILINEAR.items()):
        raise NotSeparableError
    width = use.shape[0]
    g, x, y = (wide(use.layout.by_sample(t, width)) for t in (use.gradient, use.saved("i1"), use.saved("i3")))

    def dense(part: slice) -> Tensor:
        return torch.einsum("bto,bti,btj->boij", g[part], x[part], y[part])

    def weighted(weights: Tensor) -> Tensor:
        heavy = weighed(g, weights)
        return torch.einsum("bto,bti,btj->oij", heavy, x.to(heavy), y.to(heavy))

    return Computed(use.samples, use.shape, dense, weighted, holds=(g, x, y))
