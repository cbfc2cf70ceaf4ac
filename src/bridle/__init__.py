"""See, split and hold every gradient in a PyTorch program."""

from . import errors
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
from .watch import Monitor

__all__ = [
    "ClipReport",
    "Monitor",
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
    "errors",
    "get_total_norm",
]

__version__ = "0.1.0"
