from dataclasses import dataclass

import torch
from torch import Tensor

from .._measure import clip_factor, norm_along, shares_memory
from .._validate import finite, tensor_threshold, threshold
from ..errors import ArgumentError, UnsupportedGradientError
from .base import GradientView, Policy, Scale


@dataclass(frozen=True)
class _ByUnit:
    ratio: float | Tensor
    eps: float
    unit_dims: tuple[int, ...]
    p: float = 2.0

    def check(self, grads: GradientView) -> None:
        tensor_threshold(self.ratio, "ratio")
        grads.refuse_plain_shards("by_unit")
        grads.refuse_shared_elements()
        for g in grads.values:
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"by_unit compares rows of a weight and its gradient, and this gradient is {g.layout}. "
                    "Give that parameter another policy by a name pattern, or use a dense gradient."
                )
            if shares_memory(g):
                raise UnsupportedGradientError(
                    f"by_unit scales each unit by itself, and a gradient of shape {tuple(g.shape)} and strides "
                    f"{g.stride()} stores several of them in the same memory, as an expanded tensor does. Clone it "
                    "first."
                )

    def decide(self, grads: GradientView) -> Scale:
        with torch.no_grad():
            weights, axes = grads.weights(), [self._axes(p.dim()) for p in grads.parameters]
            parts = zip(weights, grads.values, axes, strict=True)
            sizes = [torch.stack([norm_along(w, along), norm_along(g.detach(), along)]) for w, g, along in parts]
            sizes = grads.combined_slices(sizes, [set(along) for along in axes])
            return Scale([clip_factor(self._limit(weight), grad) for weight, grad in sizes])

    def _limit(self, weight: Tensor) -> Tensor:
        size = weight.clamp(min=self.eps)
        return size * (self.ratio.to(size) if isinstance(self.ratio, Tensor) else self.ratio)

    def _axes(self, dims: int) -> tuple[int, ...]:
        """Return the dimensions of a unit: all but `unit_dims`; everything for vectors and scalars, as in NFNets."""
        if dims <= 1:
            return tuple(range(dims))
        units = {d % dims for d in self.unit_dims if -dims <= d < dims}
        return tuple(d for d in range(dims) if d not in units)


def by_unit(ratio: float | Tensor = 0.01, eps: float = 1e-3, unit_dims: int | tuple[int, ...] = 0) -> Policy:
    """Limit each unit's gradient relative to the norm of that unit's weights (adaptive gradient clipping).

    A unit is one output: a row of a linear layer, a filter of a convolution, a whole bias or gain. Where
    `|G_i| > ratio * max(|W_i|, eps)`, G_i is scaled down to that limit. Brock et al., High-Performance Large-Scale
    Image Recognition Without Normalization (arXiv 2102.06171). The paper leaves the last linear layer out; use a name
    pattern for that: `{"head.*": None, "*": by_unit()}`.

    Args:
        ratio: The largest norm of a gradient relative to its weights, a number or a 0-dim tensor.
        eps: A lower bound on the norm of a unit's weights, so that zero weights can move away from zero.
        unit_dims: The dimensions that index the units. Use 0 for linear layers and convolutions, 1 for
            transposed convolutions. With all dimensions of a weight each element is a unit.

    Returns:
        A policy for `gradrein.clip_`.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `ratio`, or invalid dimensions.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, 4))
        >>> weight.grad = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.01, 0.0, 0.0, 0.0]])
        >>> report = gradrein.clip_([weight], gradrein.by_unit(ratio=0.01))
        >>> weight.grad
        tensor([[0.0100, 0.0100, 0.0100, 0.0100],
                [0.0100, 0.0000, 0.0000, 0.0000]])

    See Also:
        [`gradrein.clip_`][], [`gradrein.by_norm`][]
    """
    dims = unit_dims if isinstance(unit_dims, list | tuple) else (unit_dims,)
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise ArgumentError(f"`unit_dims` is a dimension or several, as in 0 or (0, 1); found {unit_dims!r:.80}.")
    return _ByUnit(threshold(ratio, "ratio"), finite(eps, "`eps` is a number"), tuple(dims))
