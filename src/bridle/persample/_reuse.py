"""When the owners found for one graph may be used for the next of the same form.

Only when values cannot change them. Every op between the losses and the cuts must be one that moves elements
by shape alone, or that mixes only elements which had one owner anyway. An op this file does not know, or one
that moves rows by value (an index, a sort, a sparse product), means: ask again every time.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from torch.autograd.graph import Node

from .. import graph
from . import _torch
from ._cuts import Cut, Losses, nodes_above
from ._owners import Layout

# What an op mixes, as (stride, extent) of the dimensions of its output along which it does.
_Mixing = list[tuple[int, int]]

_BY_SHAPE = frozenset(
    f"{name}Backward{i}"
    for i in range(5)
    for name in (
        *(
            "Abs",
            "Acos",
            "Add",
            "Addcdiv",
            "Addcmul",
            "Alias",
            "AsStrided",
            "Atan",
            "Cat",
            "Clamp",
            "ClampMax",
        ),
        *("ClampMin", "Clone", "ConstantPadNd", "Copy", "CopySlices", "Cos", "Diagonal", "Div", "Elu", "Erf"),
        *("Exp", "Expand", "Expm1", "Flip", "Gelu", "Glu", "HardtanhBackward", "Hardsigmoid", "Hardswish"),
        *("Hardtanh", "LeakyRelu", "Lerp", "Log", "Log1P", "LogSigmoid", "MaskedFill", "Maximum", "Mean"),
        *("Minimum", "Mul", "NativeDropout", "Neg", "NllLoss", "NllLoss2D", "Permute", "Pow", "PreluKernel"),
        *("ReflectionPad1D", "ReflectionPad2D", "Relu", "Repeat", "ReplicationPad1D", "ReplicationPad2D"),
        *("ReshapeAlias", "Reciprocal", "Rsqrt", "Rsub", "Select", "Selu", "Sigmoid", "Silu", "Sin", "Slice"),
        *("SmoothL1Loss", "MseLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Softplus"),
        *("Split", "SplitWithSizes", "Sqrt", "Squeeze", "Stack", "Sub", "Sum", "T", "Tan", "Tanh", "ToCopy"),
        *("Transpose", "Tril", "Triu", "Unbind", "Unfold", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View"),
        *("Where", "HuberLoss", "L1Loss", "Mish", "Threshold", "Std", "Var", "LinalgVectorNorm", "Chunk"),
    )
)


def _shape(node: Node) -> tuple[int, ...]:
    return graph.describe(node)[0].shape


def _inside_first(node: Node) -> _Mixing:
    shape = _shape(node)
    return [(1, prod(shape[1:]))]


def _inside_two(node: Node) -> _Mixing:
    return [(1, prod(_shape(node)[2:]))]


def _along_dim(node: Node) -> _Mixing:
    shape = _shape(node)
    dim: int = _torch.saved(node, "dim")
    dim = dim - 2**64 if dim >= 2**63 else dim
    dim %= max(len(shape), 1)
    return [(prod(shape[dim + 1 :]), shape[dim] if shape else 1)]


def _normalised(node: Node) -> _Mixing:
    return [(1, prod(_torch.saved(node, "normalized_shape")))]


def _columns(node: Node) -> _Mixing:
    return [(1, _shape(node)[-1])]


def _over_time(node: Node) -> _Mixing:
    time, columns, width = _shape(node)
    return [(1, width), (columns * width, time)]


_MIXING: dict[str, Callable[[Node], _Mixing]] = {
    "AddmmBackward0": _columns,
    "MmBackward0": _columns,
    "BmmBackward0": _inside_first,
    "BaddbmmBackward0": _inside_first,
    "ConvolutionBackward0": _inside_first,
    "NativeGroupNormBackward0": _inside_first,
    "NativeLayerNormBackward0": _normalised,
    "SoftmaxBackward0": _along_dim,
    "LogSoftmaxBackward0": _along_dim,
    "GatherBackward0": _along_dim,
    "CumsumBackward0": _along_dim,
    "MaxPool2DWithIndicesBackward0": _inside_first,
    "AvgPool2DBackward0": _inside_first,
    "AvgPool1DBackward0": _inside_first,
    "AdaptiveAvgPool2DBackward0": _inside_first,
    "MkldnnRnnLayerBackward0": _over_time,
    "ScaledDotProductFlashAttentionForCpuBackward0": _inside_two,
}
# The input of a product that may lead further down; through the other one rows are mixed by value.
_ROW_INPUT = {"AddmmBackward0": 1, "MmBackward0": 0}


def form_of(losses: Losses) -> tuple[Any, ...]:
    """Return everything about a graph but its values: ops, edges, shapes, sizes and flags."""
    read = losses.read
    number = {node: i for i, node in enumerate(read.nodes)}
    nodes = tuple(
        (
            type(node),
            tuple((None if below is None else number[below], nr) for below, nr in node.next_functions),
            tuple((out.shape, out.dtype) for out in graph.describe(node)),
            _torch.plain_values(node),
        )
        for node in read.nodes
    )
    hung = getattr(losses.root.grad_fn, "hung", ())
    return (nodes, hung, losses.samples, tuple(losses.sample_of.tolist()))


def may_reuse(cuts: Iterable[Cut], layouts: dict[Node, tuple[Layout, ...]], losses: Losses) -> bool:
    """Tell whether the owners at the cuts hold for every graph of this form, whatever its values."""
    if not all(_is_certain(found) for found in layouts.values()):
        return False
    mixing = []
    targets = {cut.node for cut in cuts}
    hidden = set(_torch.passed_by(losses.root))
    way = nodes_above(losses.read, targets | hidden)
    for node in losses.read.nodes:
        # What a reentrant checkpoint stands for hangs from the root, which hands it what the checkpoint got.
        if node not in way or node in hidden or (hidden and node is losses.root.grad_fn):
            continue
        name = graph.op(node)
        if (name in _BY_SHAPE and not graph.is_custom(node)) or _torch.hands_on(node):
            continue
        if name not in _MIXING or _mixes_rows(node, way | targets):
            return False
        mixing.append(node)
    owners = losses.owners([node for node in mixing if node not in layouts])
    for node in mixing:
        found = layouts.get(node) or owners.get(node)
        if not found:
            return False
        if not all(found[0].is_whole_along(*along) for along in _MIXING[graph.op(node)](node)):
            return False
    return True


def _is_certain(layouts: tuple[Layout, ...]) -> bool:
    """Tell whether no output is in doubt; a second output that has no gradient at all stays that way."""
    return layouts[0].certain and all(
        layout.certain or (layout.owners is not None and not layout.owners.numel()) for layout in layouts[1:]
    )


def _mixes_rows(node: Node, way: set[Node]) -> bool:
    """Tell whether the gradient goes on through the factor of a product whose rows are mixed by value."""
    row_input = _ROW_INPUT.get(graph.op(node))
    if row_input is None:
        return False
    return any(below in way for i, (below, _) in enumerate(node.next_functions) if i != row_input)
