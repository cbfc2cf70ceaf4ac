"""What each op does to per-sample gradients. A rule is one function with a decorator."""

from ..ownership.layout import NotSeparableError
from ..representations.base import SampleGrads
from . import bilinear, conv, distance, elementwise, embedding, fallback, indexing, linear, members, norm, rnn
from .context import RuleContext
from .registry import checked, has_rule, register_rule, registered, rule, rule_of, rules, runs_op

__all__ = ["apply", "has_rule", "register_rule", "registered", "rule", "rules", "runs_op"]
# Importing these files fills the table.
_FILES = (bilinear, conv, distance, elementwise, embedding, fallback, indexing, linear, members, norm, rnn)


def apply(ctx: RuleContext) -> SampleGrads:
    """Return the per-sample gradients of a use, by its rule or by the general way."""
    if all(g is None or owned.is_empty for g, owned in zip(ctx.gradients, ctx.layouts, strict=True)):
        return fallback.nothing(ctx)
    function = rule_of(ctx)
    if function is None:
        return fallback.one_by_one(ctx)
    try:
        return checked(ctx, function(ctx))
    except NotSeparableError:
        return fallback.one_by_one(ctx)
