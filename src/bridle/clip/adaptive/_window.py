"""The last so many values of each row, and their quantiles, without reading any of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["blank", "push", "quantile"]


def blank(size: int) -> Tensor:
    """An empty window: NaN stands for no value yet."""
    return torch.full((size,), math.nan, dtype=torch.float64)


def push(window: Tensor, seen: Tensor, value: Tensor) -> Tensor:
    """The window of each row with one more value, in place of the oldest once it is full."""
    slots = torch.arange(window.shape[1], device=window.device)
    here = slots == (seen % window.shape[1]).unsqueeze(1)
    return torch.where(here, value.unsqueeze(1), window)


def quantile(window: Tensor, q: float) -> Tensor:
    """The q-quantile of each row's values, between neighbours linearly; NaN for a row without any."""
    ordered = window.sort(dim=1).values  # NaN goes to the end
    count = torch.isnan(window).logical_not().sum(1, keepdim=True)
    at = (q * (count - 1).to(window.dtype)).clamp(min=0)
    below = ordered.gather(1, at.floor().long())
    above = ordered.gather(1, at.ceil().long())
    return torch.where(at == at.floor(), below, below + (above - below) * (at - at.floor())).squeeze(1)
