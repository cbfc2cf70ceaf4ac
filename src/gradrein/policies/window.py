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
    ordered = window.sort(dim=1).values  # NaN at the end
    last = torch.isnan(window).logical_not().sum(1, keepdim=True) - 1
    at = (q * last.to(ordered.dtype)).clamp(min=0)
    below = ordered.gather(1, at.floor().long())
    above = ordered.gather(1, at.ceil().long())
    return torch.where(at == at.floor(), below, below + (above - below) * (at - at.floor())).squeeze(1)
