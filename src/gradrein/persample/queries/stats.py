"""What the gradients of a batch say about each other."""

from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from ..._notebook import card, table


@dataclass(frozen=True)
class Stats:
    """What the gradients of a batch say about each other; all NaN where one of them is NaN or infinite.

    Attributes:
        mean_norm: mean of the samples' norms.
        norm_of_mean: norm of the mean gradient.
        trace_of_covariance: summed variance of one sample's gradient, estimated without bias.
        squared_signal: squared norm of the true gradient, estimated without bias; may be negative.
        signal_to_noise: squared signal divided by the trace of the covariance; NaN where both are zero.
        noise_scale: its inverse, the batch size at which noise and signal are equal; infinite when the
            signal cannot be told from zero.
        alignment: mean cosine between a sample's gradient and the mean gradient.
    """

    mean_norm: float
    norm_of_mean: float
    trace_of_covariance: float
    squared_signal: float
    signal_to_noise: float
    noise_scale: float
    alignment: float

    def _repr_html_(self) -> str:
        return card("What the gradients of the batch say about each other", table(vars(self)))


def numbers_of(norms: Tensor, cosines: Tensor, norm_of_mean: Tensor) -> Tensor:
    """Return the fields of `Stats` of at least two samples, given norms, cosines to the mean, and its norm.

    Squares are taken of norms relative to the largest, so that none overflows or vanishes.
    """
    n, top = len(norms), norms.max()
    unit = top.where(top > 0, 1)
    mean_square, square_of_mean = (norms / unit).square().mean(), (norm_of_mean.to(norms) / unit).square()
    noise = n / (n - 1) * (mean_square - square_of_mean).clamp(min=0)
    signal = (n * square_of_mean - mean_square) / (n - 1)
    numbers = [
        (norms / unit).mean() * unit,
        norm_of_mean.to(norms),
        noise * unit * unit,
        signal * unit * unit,
        torch.where((noise == 0) & (signal != 0), torch.inf, signal / noise),
        torch.where(signal > 0, noise / signal, torch.inf),
        cosines.mean(),
    ]
    return torch.stack(numbers).where(norms.isfinite().all(), nan)
