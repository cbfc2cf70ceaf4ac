"""Scaled dot-product attention: one op for each kernel that computes it."""

from ..layout import Owners
from .table import OpEntry, Step, add_op


def attention(step: Step) -> Owners:
    """Everything mixes that has one index in the first two dimensions; with grouped queries, in the first."""
    same_heads, is_bias = step.shape[1:2] == step.out.shape[1:2], step.position > 2
    apart = step.out.mixed(range(2 if same_heads else 1, len(step.out.shape)))
    return Owners(apart.ids, step.out.shape).summed_to(step.shape) if is_bias else Owners(apart.ids, step.shape)


# No attention has parameters of its own: one that is passed to it as it is, such as a learnt query, is expanded before.
add_op(
    *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
    entry=OpEntry(attention, keeps={0: "query", 1: "key", 2: "value"}),
)
