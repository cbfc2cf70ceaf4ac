"""Hold: clipping, as measure -> decide -> apply."""

from ._clip import clip_
from ._functional import clip_by_global_norm, clip_by_norm, clip_by_value
from ._groups import Replicated, Sharded, Stages
from ._report import ClipReport
from ._torch_names import (
    clip_grad_norm,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from .policies import by_norm, by_parameter, by_rms, by_unit, by_value

__all__ = [
    "ClipReport",
    "Replicated",
    "Sharded",
    "Stages",
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
    "get_total_norm",
]
