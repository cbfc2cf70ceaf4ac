"""Ops that treat every element alone and broadcast: scales, biases, position tables, class tokens.

Run by itself, such a node returns the gradient of a broadcast input before it is summed: one value for each
element of the output, owned by whoever owns that element.
"""

import torch

from .. import _torch
from .._owners import NotSeparableError
from .._pieces import Dense, Piece
from .._use import Use

OPS = (
    "AddBackward0",
    "AddBackward1",
    "AddcdivBackward0",
    "AddcmulBackward0",
    "Atan2Backward0",
    "DivBackward0",
    "DivBackward1",
    "LerpBackward0",
    "LerpBackward1",
    "MaximumBackward0",
    "MinimumBackward0",
    "MulBackward0",
    "MulBackward1",
    "PowBackward1",
    "PreluKernelBackward0",
    "RsubBackward0",
    "SubBackward0",
    "SubBackward1",
    "WhereBackward0",
)


def broadcast(use: Use) -> Piece:
    """Run the node once and sum what each sample owns."""
    with torch.no_grad():
        answer = _torch.call(use.node, use.gradients)[use.position]
    if answer is None or answer.shape != use.gradient.shape:
        raise NotSeparableError
    return Dense(use.layout.sums(answer, use.shape))


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
