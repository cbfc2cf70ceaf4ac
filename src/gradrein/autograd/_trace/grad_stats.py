"""Norm and counts of a gradient."""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._torch.nodes import version_of
from .._values import as_real, plain_values, reduction_dtype


@dataclass(frozen=True, slots=True)
class GradStats:
    """Norm and counts of a gradient, or of several combined.

    Attributes:
        norm: the 2-norm.
        size: the number of values.
        zeros: the number of zeros.
        nonfinite: the number of NaN and infinite values.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.trace((w * 3).sum()).nodes[0].incoming
        GradStats(norm=1.0, size=1, zeros=0, nonfinite=0)

    See Also:
        [`gradrein.autograd.NodeRecord`][], [`gradrein.autograd.ModuleSummary`][]
    """

    norm: float
    size: int
    zeros: int
    nonfinite: int


def combine(several: Iterable[GradStats | None]) -> GradStats | None:
    """Return the statistics of several gradients as if they were one; None if all are missing."""
    present = [stats for stats in several if stats is not None]
    if len(present) <= 1:
        return present[0] if present else None
    return GradStats(
        math.hypot(*(stats.norm for stats in present)),
        sum(stats.size for stats in present),
        sum(stats.zeros for stats in present),
        sum(stats.nonfinite for stats in present),
    )


def measure(gradient: Tensor) -> GradStats | None:
    """Measure one gradient; None for subclasses whose values are not all local, such as DTensor."""
    values = plain_values(gradient.detach())
    if values is None:
        return None
    size = gradient.numel()
    if values.numel() == 0:
        return GradStats(0.0, size, size, 0)
    zeros = size - int(torch.count_nonzero(values))
    reals = as_real(values)
    norm = torch.linalg.vector_norm(reals, dtype=reduction_dtype(reals)).item()
    nonfinite = 0
    if not 1e-15 < norm < 1e15:  # squares may have left the range of float32: measure in float64
        nonfinite = int(values.numel() - torch.isfinite(values).sum().item())
        norm = torch.linalg.vector_norm(reals, dtype=torch.float64).item()
    return GradStats(norm, size, zeros, nonfinite)


class Meter:
    """Measure gradients, each only once between the node that sends it and the one that receives it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, GradStats | None]] = {}

    def __call__(self, gradient: Tensor | None) -> GradStats | None:
        """Return the statistics of a gradient; None for a missing one."""
        if gradient is None:
            return None
        known = self._known.get(id(gradient))
        # An id is valid only while its object lives, a measurement only while the version is unchanged.
        if known is None or known[0]() is not gradient or known[1] != version_of(gradient):
            known = (weakref.ref(gradient), version_of(gradient), measure(gradient))
            self._known[id(gradient)] = known
        return known[2]
