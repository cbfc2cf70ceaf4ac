"""Ops that treat every element alone and may broadcast: scales, biases, position tables, class tokens.

The gradient of a broadcast input, before it is summed, has one value for each element of the output, owned by
whoever owns that element. The commonest ops are worked out here. Any other node returns that gradient when it is
run by itself, outside the engine, which leaves out what it was not asked for.
"""

import torch
from torch import Tensor

from .. import engine
from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from .context import RuleContext
from .registry import rule

_TWO = (
    *("AddBackward1", "AddcdivBackward0", "AddcmulBackward0", "Atan2Backward0", "DivBackward0", "DivBackward1"),
    *("FmaxBackward0", "FminBackward0", "HypotBackward0", "LerpBackward0", "LerpBackward1", "LogaddexpBackward0"),
    *("Logaddexp2Backward0", "MaximumBackward0", "MinimumBackward0", "MulBackward1", "PowBackward1", "XlogyBackward0"),
    *("PreluKernelBackward0", "RsubBackward0", "SubBackward1", "WhereBackward0"),
)
# On a bare parameter: only where each of its elements has one owner, such as one row for each sample.
_ONE = (
    *("AbsBackward0", "AcosBackward0", "AsinBackward0", "AtanBackward0", "ClampBackward0", "ClampBackward1"),
    *("ClampMaxBackward0", "ClampMinBackward0", "CosBackward0", "CoshBackward0", "EluBackward0", "ErfBackward0"),
    *("Exp2Backward0", "ExpBackward0", "Expm1Backward0", "GeluBackward0", "HardsigmoidBackward0", "HardswishBackward0"),
    *("HardtanhBackward0", "LeakyReluBackward0", "Log10Backward0", "Log1PBackward0", "Log2Backward0", "LogBackward0"),
    *("LogSigmoidBackward0", "MaskedFillBackward0", "MishBackward0", "NegBackward0", "PowBackward0"),
    *("ReciprocalBackward0", "ReluBackward0", "RsqrtBackward0", "SgnBackward0", "SigmoidBackward0", "SiluBackward0"),
    *("SinBackward0", "SinhBackward0", "SoftplusBackward0", "SqrtBackward0", "TanBackward0", "TanhBackward0"),
)


@rule(*_TWO, *_ONE, runs_op=True)
def broadcast(ctx: RuleContext) -> SampleGrads:
    """Run the node once and sum what each sample owns."""
    with torch.no_grad():
        answer = engine.call(ctx.node, ctx.gradients)[ctx.position]
    if answer is None or answer.shape != ctx.gradient.shape:
        raise NotSeparableError
    return Dense(ctx.layout.sums(answer, ctx.shape))


@rule("AddBackward0")
def add(ctx: RuleContext) -> SampleGrads:
    """``self + alpha * other``."""
    return _times(ctx, ctx.saved("alpha") if ctx.position == 1 else 1)


@rule("SubBackward0")
def subtract(ctx: RuleContext) -> SampleGrads:
    """``self - alpha * other``."""
    return _times(ctx, -ctx.saved("alpha") if ctx.position == 1 else 1)


@rule("MulBackward0")
def multiply(ctx: RuleContext) -> SampleGrads:
    """``self * other``: the gradient of one is multiplied by the other."""
    return _times(ctx, ctx.saved("self" if ctx.position == 1 else "other"))


def _times(ctx: RuleContext, factor: Tensor | complex) -> SampleGrads:
    g = ctx.gradient
    if isinstance(factor, Tensor):
        g = upcast_half(g) * factor.conj()
    elif factor != 1:
        g = g * factor.conjugate()
    if g.is_complex() and not ctx.dtype.is_complex:  # a real value that met complex ones
        g = g.real
    return Dense(ctx.layout.sums(g, ctx.shape))


@rule("ExpandBackward0")
def expand(ctx: RuleContext) -> SampleGrads:
    """Sum what each sample owns of the expanded value."""
    return Dense(ctx.layout.sums(ctx.gradient, ctx.shape))


@rule("RepeatBackward0")
def repeat(ctx: RuleContext) -> SampleGrads:
    """Undo a repetition: each dimension of the output is (times, size), and only the size stays."""
    sizes = ctx.gradient.shape
    shape = (1,) * (len(sizes) - len(ctx.shape)) + ctx.shape
    cut = [n for out, size in zip(sizes, shape, strict=True) for n in (out // max(size, 1), size)]
    kept = [n for size in shape for n in (1, size)]
    return Dense(ctx.layout.sums(ctx.gradient.reshape(cut), kept).reshape(ctx.samples, *ctx.shape))
