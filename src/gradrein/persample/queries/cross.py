"""Inner products between the gradients of two batches."""

import torch
from torch import Tensor

from ..representations.base import SampleGrads
from ..representations.numerics import as_rows, double, inner_products, row_norms
from ..representations.rows import Rows
from ..representations.sum import Sum


def cross_products(a: SampleGrads, b: SampleGrads) -> Tensor:
    """Return the inner products of all pairs, in float64."""
    if isinstance(a, Rows | Sum):  # writing these down may take much memory: one at a time, as a direction
        return torch.stack([_along(a, b.dense(slice(i, i + 1))) for i in range(b.samples)], 1)
    if isinstance(b, Rows | Sum):
        return cross_products(b, a).T
    blocks = []
    for part in a.chunks():
        left = as_rows(a.dense(part))
        blocks.append(torch.cat([inner_products(left, as_rows(b.dense(some)).to(left)) for some in b.chunks()], 1))
    return torch.cat(blocks)


def _along(grads: SampleGrads, direction: Tensor) -> Tensor:
    size = row_norms(direction)[0]
    size = size.where((size > 0) & (size < torch.inf), 1)
    return grads.dot(double(direction[0]) / size) * size
