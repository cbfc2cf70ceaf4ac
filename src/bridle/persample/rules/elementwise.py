"""Ops that treat every element alone and may broadcast: scales, biases, position tables, class tokens.

The gradient of a broadcast input, before it is summed, has one value for each element of the output, owned by
whoever owns that element. The commonest ops are worked out here. Any other node returns that gradient when it is
run by itself, outside the engine, which leaves out what it was not asked for.
"""

import torch
from torch import Tensor

from .. import _torch
from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, Piece
from ..representations.numerics import wide
from .context import Use

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
CALLED = (*_TWO, *_ONE)
OPS = (*_TWO, "AddBackward0", "MulBackward0", "SubBackward0")


def broadcast(use: Use) -> Piece:
    """Run the node once and sum what each sample owns."""
    with torch.no_grad():
        answer = _torch.call(use.node, use.gradients)[use.position]
    if answer is None or answer.shape != use.gradient.shape:
        raise NotSeparableError
    return Dense(use.layout.sums(answer, use.shape))


def add(use: Use) -> Piece:
    """``self + alpha * other``."""
    return _times(use, use.saved("alpha") if use.position == 1 else 1)


def subtract(use: Use) -> Piece:
    """``self - alpha * other``."""
    return _times(use, -use.saved("alpha") if use.position == 1 else 1)


def multiply(use: Use) -> Piece:
    """``self * other``: the gradient of one is multiplied by the other."""
    return _times(use, use.saved("self" if use.position == 1 else "other"))


def _times(use: Use, factor: Tensor | complex) -> Piece:
    g = use.gradient
    if isinstance(factor, Tensor):
        g = wide(g) * factor.conj()
    elif factor != 1:
        g = g * factor.conjugate()
    if g.is_complex() and not use.dtype.is_complex:  # a real value that met complex ones
        g = g.real
    return Dense(use.layout.sums(g, use.shape))


def expand(use: Use) -> Piece:
    """Sum what each sample owns of the expanded value."""
    return Dense(use.layout.sums(use.gradient, use.shape))


def repeat(use: Use) -> Piece:
    """Undo a repetition: each dimension of the output is (times, size), and only the size stays."""
    sizes = use.gradient.shape
    shape = (1,) * (len(sizes) - len(use.shape)) + use.shape
    cut = [n for out, size in zip(sizes, shape, strict=True) for n in (out // max(size, 1), size)]
    kept = [n for size in shape for n in (1, size)]
    return Dense(use.layout.sums(use.gradient.reshape(cut), kept).reshape(use.samples, *use.shape))
