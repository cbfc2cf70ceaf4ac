from dataclasses import dataclass

import torch
from torch import Tensor

from .._measure import clip_factor
from .._validate import tensor_threshold, threshold
from .base import GradientView, Policy, Scale


@dataclass(frozen=True)
class _ByRms:
    max_rms: float | Tensor
    p: float = 2.0

    def check(self, grads: GradientView) -> None:
        tensor_threshold(self.max_rms, "max_rms")
        grads.numels()  # raises for a shard whose full size is unknown

    def decide(self, grads: GradientView) -> Scale:
        norms = grads.norms(2.0)
        roots = torch.tensor([max(1, n) ** 0.5 for n in grads.numels()], dtype=norms.dtype, device="cpu")
        return Scale(clip_factor(self.max_rms, norms / roots.to(norms.device, non_blocking=True)))


def by_rms(max_rms: float | Tensor) -> Policy:
    """Limit the root mean square of the elements of each gradient: one limit for large and small layers.

    Args:
        max_rms: The largest root mean square allowed, a number or a 0-dim tensor.

    Returns:
        A policy for `gradrein.clip_`.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `max_rms`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> report = gradrein.clip_([weight], gradrein.by_rms(1.0))
        >>> weight.grad
        tensor([1., 1., 1., 1.])

    See Also:
        [`gradrein.clip_`][], [`gradrein.by_norm`][], [`gradrein.by_unit`][]
    """
    return _ByRms(threshold(max_rms, "max_rms"))
