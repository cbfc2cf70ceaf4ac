"""What the gradients of a batch say about each other."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .representations.numerics import double


@dataclass(frozen=True)
class Stats:
    """What the gradients of a batch say about each other.

    Attributes:
        mean_norm: mean of the samples' norms.
        norm_of_mean: norm of the mean gradient.
        trace_of_covariance: summed variance of one sample's gradient, estimated without bias.
        squared_signal: squared norm of the true gradient, estimated without bias; may be negative.
        signal_to_noise: squared signal divided by the trace of the covariance.
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


def numbers_of(lengths: Tensor, cosines: Tensor, mean: Iterable[Tensor]) -> Tensor:
    """Return the fields of `Stats` of at least two samples, given norms, cosines to the mean, and the mean."""
    n = len(lengths)
    squares = [double(v).abs().square().sum().to(lengths) for v in mean]
    squared_mean = torch.stack(squares).sum() if squares else lengths.new_zeros(())
    mean_square = lengths.square().mean()
    noise = n / (n - 1) * (mean_square - squared_mean).clamp(min=0)
    signal = (n * squared_mean - mean_square) / (n - 1)
    to_noise = torch.where(noise == 0, torch.inf, signal / noise)
    scale = torch.where(signal > 0, noise / signal, torch.inf)
    return torch.stack([lengths.mean(), squared_mean.sqrt(), noise, signal, to_noise, scale, cosines.mean()])
