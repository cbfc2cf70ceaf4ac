"""The last n values of each row, and their quantiles, without reading a value from a device."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def empty(size: int) -> Tensor:
    """Return an empty window: NaN stands for no value yet."""
    return torch.full((size,), math.nan, dtype=torch.float64)


def push(window: Tensor, seen: Tensor, value: Tensor) -> Tensor:
    """Return the window of each row with one more value, in place of the oldest once it is full."""
    return window.scatter(1, (seen % window.shape[1]).long().unsqueeze(1), value.unsqueeze(1))


def quantile(window: Tensor, q: float, seen: Tensor) -> Tensor:
    """Return the q-quantile of each row, linear between neighbours; NaN for a row without values.

    Args:
        window: The values of each row.
        q: Which quantile.
        seen: How many values each row was given, of which it has the last.
    """
    at = torch.rsub(seen, -q, alpha=-q).clamp_(0, q * (window.shape[1] - 1)).unsqueeze(1)  # q times index of the last
    return _between(window, at, [at, at.ceil()])[0]


def quantile_and_largest(window: Tensor, q: float, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same, and the largest value of each row, given how many values it had before the last."""
    end = last.clamp(max=window.shape[1] - 1).unsqueeze(1)
    at = end * q
    value, rest = _between(window, at, [at, at.ceil(), end])
    return value, rest[0]


def _between(window: Tensor, at: Tensor, indices: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    ordered = window.sort(dim=1).values  # NaN at the end
    below, above, *rest = ordered.gather(1, torch.cat(indices, 1).long()).unbind(1)
    return torch.lerp(below, above, at.frac().squeeze(1)), rest
