"""Per-sample gradients, norms and clipping of any model as it stands."""

from ._audit import Audit
from ._nn_utils import call_for_per_sample_grads
from ._noise_stats import Stats
from ._per_sample import per_sample
from ._result import PerSample
from .ops import register_rule
from .ops.context import RuleContext

__all__ = ["Audit", "PerSample", "RuleContext", "Stats", "call_for_per_sample_grads", "per_sample", "register_rule"]
