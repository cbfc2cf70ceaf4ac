"""Clip policies, one file each, and what is needed to write another.

A function such as `by_norm(1.0)` returns a policy without a memory, which may be built in the call. A class such as
`ByMedian` learns from the gradients it has seen: build it once, before the loop.
"""

from .._measure import clip_factor
from .adaptive import AdaptivePolicy
from .base import Clamp, Decision, GradientView, Policy, Scale, Skip
from .median import ByMedian
from .norm import by_norm
from .overshoot import ByOvershoot
from .quantile import ByQuantile
from .rms import by_rms
from .running_norm import ByRunningNorm
from .skip_spikes import SkipSpikes
from .state import State
from .unit import by_unit
from .value import by_value
from .zscore import ByZScore

__all__ = [
    "AdaptivePolicy",
    "ByMedian",
    "ByOvershoot",
    "ByQuantile",
    "ByRunningNorm",
    "ByZScore",
    "Clamp",
    "Decision",
    "GradientView",
    "Policy",
    "Scale",
    "Skip",
    "SkipSpikes",
    "State",
    "by_norm",
    "by_rms",
    "by_unit",
    "by_value",
    "clip_factor",
]
