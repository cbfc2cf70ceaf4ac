import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _devices
from .._measure import clip_factor, norm_along
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
        grads.refuse_partial("by_unit")
        for g in grads.values:
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"by_unit compares rows of a weight and its gradient, and this gradient is {g.layout}. "
                    "Give that parameter another policy by a name pattern, or use a dense gradient."
                )

    def decide(self, grads: GradientView) -> Scale:
        with torch.no_grad():
            axes = [self._axes(p.dim()) for p in grads.parameters]
            sizes: dict[int, Tensor] = {}
            alike = _by_length(grads, axes)
            for where in alike:
                weights, rows = ([_rows(t[i], axes[i]) for i in where] for t in (grads.weights(), grads.values))
                both = torch.stack([_norms(weights), _norms(rows)])
                sizes.update(zip(where, both.split_with_sizes([len(r) for r in rows], 1), strict=True))
            if grads.is_split:
                slices = [sizes[i].view(2, *_kept(g, axes[i])) for i, g in enumerate(grads.values)]
                whole = grads.combined_slices(slices, [set(along) for along in axes])
                sizes = {i: each.flatten(1) for i, each in enumerate(whole)}
            order, home = [i for where in alike for i in where], grads.norms(self.p)
            weight, grad = torch.cat([sizes[i].to(home) for i in order], 1)
            ratio = self.ratio.to(home) if isinstance(self.ratio, Tensor) else self.ratio
            limit = weight.clamp(min=self.eps).mul_(ratio)
            return Scale(_spread(clip_factor(limit, grad), grads, alike, axes))

    def _axes(self, dims: int) -> tuple[int, ...]:
        """Return the dimensions of a unit: all but `unit_dims`; everything for vectors and scalars, as in NFNets."""
        if dims <= 1:
            return tuple(range(dims))
        units = {d % dims for d in self.unit_dims if -dims <= d < dims}
        return tuple(d for d in range(dims) if d not in units)


def _kept(t: Tensor, axes: tuple[int, ...]) -> list[int]:
    return [1 if d in axes else n for d, n in enumerate(t.shape)]


def _rows(t: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the units of a tensor as rows; of complex ones the parts."""
    units = [d for d in range(t.dim()) if d not in axes]
    rows = t.detach().permute([*units, *axes]).reshape(math.prod(t.shape[d] for d in units), -1 if t.numel() else 0)
    return torch.view_as_real(rows.resolve_conj()).flatten(1) if t.is_complex() else rows


def _norms(rows: list[Tensor]) -> Tensor:
    return norm_along(torch.cat(rows) if len(rows) > 1 else rows[0], 1).squeeze(1)


def _by_length(grads: GradientView, axes: list[tuple[int, ...]]) -> list[list[int]]:
    """Return the indices of gradients whose units are equally long, and of one kind."""
    alike: dict[object, list[int]] = {}
    for i, (p, g) in enumerate(zip(grads.parameters, grads.values, strict=True)):
        length = math.prod(g.shape[d] for d in axes[i])
        alike.setdefault((length, p.dtype, g.dtype, g.device), []).append(i)
    return list(alike.values())


def _spread(factors: Tensor, grads: GradientView, alike: list[list[int]], axes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return the factors of units for each gradient: on a device for each element, so that few operations use them."""
    by, done, values = {}, 0, grads.values
    for where in alike:
        counts = [math.prod(_kept(values[i], axes[i])) for i in where]
        g, own = values[where[0]], factors[done : done + sum(counts)]
        done += sum(counts)
        if not _devices.readable_now([g]) and not g.is_complex():
            length = math.prod(g.shape[d] for d in axes[where[0]])
            dtype = g.dtype if g.dtype == torch.float64 else torch.float32
            own = own[:, None].expand(-1, length).to(g.device, dtype, copy=True, memory_format=torch.contiguous_format)
        for i, part in zip(where, own.split_with_sizes(counts), strict=True):
            along = axes[i]
            if part.dim() == 1:
                by[i] = part.to(g.device).view(_kept(values[i], along))
                continue
            order = [*(d for d in range(values[i].dim()) if d not in along), *along]
            part = part.view([values[i].shape[d] for d in order])
            by[i] = part.permute([order.index(d) for d in range(len(order))])
    return [by[i] for i in range(len(values))]


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
