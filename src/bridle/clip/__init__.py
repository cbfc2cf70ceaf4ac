"""Hold: clipping, as measure -> decide -> apply."""

from ._clip import clip_
from ._clipper import Clipper
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
from .adaptive import (
    by_element_spike,
    by_median,
    by_overshoot,
    by_quantile,
    by_running_norm,
    by_stable_norm,
    by_tracked_quantile,
    by_zscore,
    skip_spikes,
)
from .policies import by_norm, by_parameter, by_rms, by_unit, by_value

__all__ = [
    "ClipReport",
    "Clipper",
    "Replicated",
    "Sharded",
    "Stages",
    "by_element_spike",
    "by_median",
    "by_norm",
    "by_overshoot",
    "by_parameter",
    "by_quantile",
    "by_rms",
    "by_running_norm",
    "by_stable_norm",
    "by_tracked_quantile",
    "by_unit",
    "by_value",
    "by_zscore",
    "clip_",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_grad_norm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "skip_spikes",
]
