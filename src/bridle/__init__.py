"""See, split and hold every gradient in a PyTorch program."""

from . import autograd, errors, graph
from .autograd import backward, grad, trace, unreached
from .autograd._anomaly import detect_anomaly  # bridle.autograd.detect_anomaly is torch's own
from .clip import (
    ClipReport,
    by_norm,
    by_parameter,
    by_rms,
    by_unit,
    by_value,
    clip_,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    clip_grad_norm,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

__all__ = [
    "ClipReport",
    "autograd",
    "backward",
    "by_norm",
    "by_parameter",
    "by_rms",
    "by_unit",
    "by_value",
    "clip_",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "detect_anomaly",
    "errors",
    "get_total_norm",
    "grad",
    "graph",
    "trace",
    "unreached",
]

__version__ = "0.1.0"
