"""What per-sample gradients have to know of each op: one entry in one table, which these files fill.

An entry says where an op sends owners, which inputs it keeps, whether it moves elements by an index, and the rule for
its per-sample gradients if it has one. All names that torch has for an op, on whichever device, share the entry. An op
without an entry sends every output to every input, so that owners are observed; if it uses parameters, its backward is
run once for each sample.
"""

from . import (  # noqa: F401
    attention,
    conv,
    elementwise,
    indexing,
    norm,
    products,
    recurrent,
    reductions,
    views,
)
from .rules import apply, has_rule, register_rule, registered, running_op
from .samplewise import declare_samplewise, declared, samplewise

__all__ = [
    "apply",
    "declare_samplewise",
    "declared",
    "has_rule",
    "register_rule",
    "registered",
    "running_op",
    "samplewise",
]
