from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._check import tensor_limit, threshold
from .._decision import Scale, down_to
from .._gradients import Gradients

__all__ = ["by_rms"]


@dataclass(frozen=True)
class _ByRms:
    limit: float | Tensor
    p: float = 2.0

    def check(self, grads: Gradients) -> None:
        tensor_limit(self.limit, "limit")
        grads.sizes()  # refuses what does not tell its size

    def decide(self, grads: Gradients) -> Scale:
        each = grads.norms(2.0)
        sizes = torch.tensor([max(1, n) for n in grads.sizes()], dtype=each.dtype).to(each.device)
        return Scale(down_to(self.limit, each / sizes.sqrt()))


def by_rms(limit: float | Tensor) -> _ByRms:
    """Each gradient by the root mean square of its elements: one limit that fits large and small layers alike.

    Args:
        limit: the largest root mean square allowed, a number or a 0-dim tensor.

    Returns:
        A policy for `bridle.clip_`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> report = bridle.clip_([weight], bridle.by_rms(1.0))
        >>> weight.grad
        tensor([1., 1., 1., 1.])
    """
    return _ByRms(threshold(limit, "limit"))
