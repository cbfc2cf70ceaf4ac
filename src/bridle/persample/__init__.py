"""Per-sample gradients, norms and clipping of any model as it stands."""

from ._answers import PerSample
from ._api import per_sample
from ._audit import Audit
from ._dropin import call_for_per_sample_grads
from ._stats import Stats
from ._use import Use
from .rules import register_rule

__all__ = ["Audit", "PerSample", "Stats", "Use", "call_for_per_sample_grads", "per_sample", "register_rule"]
