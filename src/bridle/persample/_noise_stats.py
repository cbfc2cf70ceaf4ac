"""What the gradients of a batch say about each other."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import inf, nan

import torch
from torch import Tensor

from .representations.numerics import double, row_norms


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


def stats_of(lengths: Tensor, cosines: Tensor, mean: Iterable[Tensor]) -> Stats:
    """Return the statistics of at least two samples, given their norms, their cosines to the mean, and the mean.

    Squares are taken of norms relative to the largest, so that none overflows or vanishes.
    """
    n, top = len(lengths), float(lengths.max())
    if not bool(lengths.isfinite().all()):
        return Stats(*[nan] * len(fields(Stats)))
    unit = top or 1.0
    parts = [row_norms(double(v)[None]) for v in mean]
    norm_of_mean = float(row_norms(torch.stack(parts, 1))[0]) if parts else 0.0
    mean_square, square_of_mean = float((lengths / unit).square().mean()), (norm_of_mean / unit) ** 2
    noise = n / (n - 1) * max(0.0, mean_square - square_of_mean)
    signal = (n * square_of_mean - mean_square) / (n - 1)
    return Stats(
        mean_norm=float((lengths / unit).mean()) * unit,
        norm_of_mean=norm_of_mean,
        trace_of_covariance=noise * unit * unit,
        squared_signal=signal * unit * unit,
        signal_to_noise=signal / noise if noise else inf if signal else nan,
        noise_scale=noise / signal if signal > 0 else inf,
        alignment=float(cosines.mean()),
    )
