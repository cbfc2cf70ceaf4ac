"""Gradients in PyTorch: clip them, split them by sample, understand them."""

from . import attribution, autograd, distributed, errors, functional, graph, policies, private
from ._compile import compile  # noqa: A004
from ._kernels import kernel_status
from .autograd import backward, detect_nonfinite, grad, trace
from .clip import (
    Clipper,
    ClipReport,
    clip_,
    clip_grad_norm,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from .functional import clip_by_global_norm, clip_by_norm, clip_by_value
from .persample import call_for_per_sample_grads, declare_samplewise, per_sample, register_rule
from .policies import by_norm, by_rms, by_unit, by_value
from .watch import Monitor

__all__ = [
    "ClipReport",
    "Clipper",
    "Monitor",
    "attribution",
    "autograd",
    "backward",
    "by_norm",
    "by_rms",
    "by_unit",
    "by_value",
    "call_for_per_sample_grads",
    "clip_",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "compile",
    "declare_samplewise",
    "detect_nonfinite",
    "distributed",
    "errors",
    "functional",
    "get_total_norm",
    "grad",
    "graph",
    "kernel_status",
    "per_sample",
    "policies",
    "private",
    "register_rule",
    "trace",
]

__version__ = "0.1.0"
