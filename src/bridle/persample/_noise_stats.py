"""What the gradients of a batch say about each other."""

from collections.abc import Iterable
from dataclasses import dataclass

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


def stats_of(lengths: Tensor, cosines: Tensor, mean: Iterable[Tensor]) -> Stats:
    """Return the statistics of at least two samples, given their norms, their cosines to the mean, and the mean."""
    n = len(lengths)
    norm_of_mean = float(sum(float(double(v).abs().square().sum()) for v in mean)) ** 0.5
    mean_square = float(lengths.square().mean())
    noise = n / (n - 1) * max(0.0, mean_square - norm_of_mean**2)
    signal = (n * norm_of_mean**2 - mean_square) / (n - 1)
    return Stats(
        mean_norm=float(lengths.mean()),
        norm_of_mean=norm_of_mean,
        trace_of_covariance=noise,
        squared_signal=signal,
        signal_to_noise=signal / noise if noise else float("inf"),
        noise_scale=noise / signal if signal > 0 else float("inf"),
        alignment=float(cosines.mean()),
    )
