"""What each op does to per-sample gradients. A rule is one function with a decorator."""

from ..representations.base import SampleGrads
from . import bilinear, conv, distance, elementwise, embedding, fallback, indexing, linear, members, norm, rnn
from .context import RuleContext
from .registry import apply_rule, has_rule, register_rule, registered, rule, rules, running_op

__all__ = ["apply", "has_rule", "register_rule", "registered", "rule", "rules", "running_op"]
# Importing these files fills the table.
_FILES = (bilinear, conv, distance, elementwise, embedding, fallback, indexing, linear, members, norm, rnn)


def apply(ctx: RuleContext) -> SampleGrads:
    """Return the per-sample gradients of a use, by its rule or by the general way."""
    for g, owned in zip(ctx.gradients, ctx.layouts, strict=True):
        if g is not None and not owned.is_empty:
            return apply_rule(ctx) or fallback.one_by_one(ctx)
    return fallback.nothing(ctx)
