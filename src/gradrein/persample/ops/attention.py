"""Scaled dot-product attention: one op for each kernel that computes it."""

from ..layout import Owners
from .table import OpEntry, Step, add_op

_KEEPS = {0: "query", 1: "key", 2: "value"}
# How each kernel names the starts of sequences of different lengths that lie in one batch.
_STARTS = ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k")


def attention(step: Step) -> Owners:
    """Everything mixes that has one index in the first two dimensions; with grouped queries, in the first."""
    same_heads, is_bias = step.shape[1:2] == step.out.shape[1:2], step.position > 2
    apart = step.out.mixed(range(2 if same_heads else 1, len(step.out.shape)))
    return Owners(apart.ids, step.out.shape).summed_to(step.shape) if is_bias else Owners(apart.ids, step.shape)


def by_sequence(step: Step) -> Owners:
    """Kernels called directly: everything mixes in one sequence, and everything where sequences have no dimension."""
    if step.position > 2 or any(step.value(name) is not None for name in _STARTS):
        return step.mixed()
    return step.mixed_along(*range(1, len(step.shape)))


# No attention has parameters of its own: one that is passed to it as it is, such as a learnt query, is expanded before.
add_op(
    *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
    entry=OpEntry(attention, keeps=_KEEPS),
)
add_op("FlashAttention", "EfficientAttention", "CudnnAttention", entry=OpEntry(by_sequence, keeps=_KEEPS))
