"""The last n values of each row, and their quantiles, without reading a value from a device."""

import math

import torch
from torch import Tensor


def empty(size: int) -> Tensor:
    """Return an empty window: NaN stands for no value yet."""
    return torch.full((size,), math.nan, dtype=torch.float64)


def push(window: Tensor, value: Tensor) -> Tensor:
    """Return the window of each row with one more value, without the oldest."""
    return torch.cat([window[:, 1:], value.unsqueeze(1)], 1)


def middle(seen: Tensor, size: int) -> Tensor:
    """Return the indices of the two values, in order, between which the median lies: one and the same for odd numbers.

    Args:
        seen: How many values each row was given, of which it has the last.
        size: How many it holds.
    """
    halves = torch.arange(-0.5, 0.5, 0.5, dtype=seen.dtype, device=seen.device)
    return torch.add(halves, seen.clamp(max=size).unsqueeze(1), alpha=0.5).long()


def median(window: Tensor, where: Tensor) -> Tensor:
    """Return the median of each row, at the indices of `middle`; NaN for a row without values."""
    below, above = window.sort(dim=1).values.gather(1, where).unbind(1)  # NaN at the end
    return torch.lerp(below, above, 0.5)


def quantile_and_largest(window: Tensor, q: float, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return a quantile and the largest value of each row, given how many values it had before the last."""
    end = before.clamp(max=window.shape[1] - 1).unsqueeze(1)
    at = end * q
    ordered = window.sort(dim=1).values
    below, above, largest = ordered.gather(1, torch.cat([at, at.ceil(), end], 1).long()).unbind(1)
    return torch.lerp(below, above, at.frac().squeeze(1)), largest
