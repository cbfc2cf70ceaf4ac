"""Ops that treat every element alone and may broadcast: scales, biases, position tables, activations, losses.

The gradient of a broadcast input, before it is summed, has one value for each element of the output, owned by
whoever owns that element. The commonest ops are worked out here. Any other node returns that gradient when it is
run by itself, outside the engine, which leaves out what it was not asked for.
"""

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import engine
from ..layout import NotSeparableError, Owners
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import upcast_half
from .rules import RuleContext
from .table import OpEntry, Step, add_op, entry_of


def elementwise(step: Step) -> Owners:
    """Every element by itself, inputs broadcast; a loss may reduce to one number."""
    sizes = zip(reversed(step.shape), reversed(step.out.shape), strict=False)
    if len(step.shape) > len(step.out.shape) or any(n not in (1, size) for n, size in sizes):
        return step.mixed()
    return step.out.summed_to(step.shape)


def is_elementwise(node: Node) -> bool:
    """Return whether an op treats every element alone; it may also broadcast a constant."""
    entry = entry_of(node)
    return entry is not None and entry.owners is elementwise


def broadcast(ctx: RuleContext) -> SampleGrads:
    """Run the node once and sum what each sample owns."""
    with torch.no_grad():
        answer = engine.call(ctx.node, ctx.gradients)[ctx.position]
    if answer is None or answer.shape != ctx.gradient.shape:
        raise NotSeparableError
    return Dense(ctx.layout.sums(answer, ctx.shape))


def add(ctx: RuleContext) -> SampleGrads:
    """``self + alpha * other``."""
    return _times(ctx, ctx.saved("alpha") if ctx.position == 1 else 1)


def subtract(ctx: RuleContext) -> SampleGrads:
    """``self - alpha * other``."""
    return _times(ctx, -ctx.saved("alpha") if ctx.position == 1 else 1)


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


def expand(ctx: RuleContext) -> SampleGrads:
    """Sum what each sample owns of the expanded value."""
    return Dense(ctx.layout.sums(ctx.gradient, ctx.shape))


add_op("Add", entry=OpEntry(elementwise, rule=add))
add_op("Sub", entry=OpEntry(elementwise, rule=subtract))
add_op("Mul", entry=OpEntry(elementwise, keeps={0: "self", 1: "other"}, rule=multiply))
add_op("Expand", entry=OpEntry(elementwise, rule=expand))
add_op(
    *("Atan2", "Div", "Fmax", "Fmin", "Hypot", "Logaddexp", "Logaddexp2", "Maximum", "Minimum", "Xlogy"),
    entry=OpEntry(elementwise, {0: "self", 1: "other"}, rule=broadcast, runs_op=True),
)
add_op("Addcmul", "Addcdiv", entry=OpEntry(elementwise, {1: "tensor1", 2: "tensor2"}, rule=broadcast, runs_op=True))
add_op("Pow", entry=OpEntry(elementwise, {0: "self", 1: "exponent"}, rule=broadcast, runs_op=True))
add_op("Lerp", entry=OpEntry(elementwise, {2: "weight"}, rule=broadcast, runs_op=True))
add_op("PreluKernel", entry=OpEntry(elementwise, {0: "self"}, rule=broadcast, runs_op=True))
# Of one input, the rule serves where each element of a bare parameter has one owner, such as one row for each sample.
add_op(
    *("Abs", "Acos", "Asin", "Atan", "Clamp", "ClampMax", "ClampMin", "Cos", "Cosh", "Elu", "Erf", "Exp", "Exp2"),
    *("Expm1", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Log", "Log10", "Log1P", "Log2"),
    *("LogSigmoid", "MaskedFill", "Mish", "Neg", "Reciprocal", "Relu", "Rsqrt", "Rsub", "Sgn", "Sigmoid", "Silu"),
    *("Sin", "Sinh", "Softplus", "Sqrt", "Tan", "Tanh", "Where"),
    entry=OpEntry(elementwise, rule=broadcast, runs_op=True),
)
# These take no parameters, but for the odd model: their backward is then run once for each sample.
add_op(
    *("Acosh", "Alias", "Angle", "Asinh", "Atanh", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Ceil"),
    *("Celu", "Clone", "Complex", "Conj", "ConjPhysical", "Copy", "Copysign", "Deg2Rad", "Digamma", "Erfc", "Erfinv"),
    *("Fill", "Floor", "Fmod", "Frac", "Hardshrink", "HuberLoss", "I0", "Imag", "L1Loss", "Lgamma", "Logit"),
    *("MseLoss", "NanToNum", "Polar", "Rad2Deg", "Real", "Remainder", "ResolveConj", "ResolveNeg", "Round"),
    *("RreluWithNoise", "Selu", "Sign", "Sinc", "SmoothL1Loss", "SoftMarginLoss", "Softshrink", "Threshold"),
    *("ToCopy", "Tril", "Triu", "Trunc", "Zero", "KlDiv", "Square", "NegView", "Contiguous"),
    entry=OpEntry(elementwise),
)
# The mask of the CPU is a factor of a product, that of other devices is kept by these.
add_op("NativeDropout", "FusedDropout", entry=OpEntry(elementwise, rule=broadcast, runs_op=True))
