"""Per-sample gradients, norms and clipping of any model as it stands."""

from ._nn_utils import call_for_per_sample_grads
from ._per_sample import per_sample
from .ops import declare_samplewise, register_rule
from .ops.rules import RuleContext
from .queries.audit import Audit
from .queries.result import PerSample
from .queries.stats import Stats

__all__ = [
    "Audit",
    "PerSample",
    "RuleContext",
    "Stats",
    "call_for_per_sample_grads",
    "declare_samplewise",
    "per_sample",
    "register_rule",
]
