"""The last n values of each row, and their quantiles, without reading a value from a device."""

import math

import torch
from torch import Tensor


def empty(size: int) -> Tensor:
    """Return an empty window: NaN stands for no value yet."""
    return torch.full((size,), math.nan, dtype=torch.float64)


def push(window: Tensor, seen: Tensor, value: Tensor) -> Tensor:
    """Return the window of each row with one more value, in place of the oldest once it is full."""
    slots = torch.arange(window.shape[1], device=window.device)
    here = slots == (seen % window.shape[1]).unsqueeze(1)
    return torch.where(here, value.unsqueeze(1), window)


def quantile(window: Tensor, q: float) -> Tensor:
    """Return the q-quantile of each row, linear between neighbours; NaN for a row without values."""
    return _quantile(*_ordered(window), q)


def quantile_and_largest(window: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """Return the q-quantile of each row and its largest value, sorted once; NaN for a row without values."""
    ordered, last = _ordered(window)
    return _quantile(ordered, last, q), ordered.gather(1, last.clamp(min=0)).squeeze(1)


def _ordered(window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of each row in order, NaN at the end, and the index of the last value; -1 for none."""
    return window.sort(dim=1).values, torch.isnan(window).logical_not().sum(1, keepdim=True) - 1


def _quantile(ordered: Tensor, last: Tensor, q: float) -> Tensor:
    at = (q * last.to(ordered.dtype)).clamp(min=0)
    below = ordered.gather(1, at.floor().long())
    above = ordered.gather(1, at.ceil().long())
    return torch.where(at == at.floor(), below, below + (above - below) * (at - at.floor())).squeeze(1)
