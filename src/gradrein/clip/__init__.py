"""Clip gradients: measure, decide, apply."""

from ._clip import NonFinite as NonFinite
from ._clip import clip_
from ._clipper import Clipper
from ._nn_utils import (
    clip_grad_norm,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from ._report import ClipReport

__all__ = [
    "ClipReport",
    "Clipper",
    "clip_",
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
]
