"""Per-sample gradients, norms and clipping of any model as it stands."""

from ._answers import PerSample, Stats
from ._api import per_sample
from ._use import Use
from .rules import register_rule

__all__ = ["PerSample", "Stats", "Use", "per_sample", "register_rule"]
