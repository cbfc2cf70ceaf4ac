"""From a shared value down to the parameter it is made from."""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from . import _torch
from ._pieces import Computed, Dense, Piece
from .rules.embedding import Rows
from .rules.linear import Outer

_SAME = frozenset({"ToCopyBackward0", "CloneBackward0", "AliasBackward0"})
_RESHAPED = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
    }
)


def lower(piece: Piece, value: GradientEdge, leaf: Node) -> Piece:
    """Return per-sample gradients of the leaf, given those of a value made from it.

    A transposed weight, a cast one and a look-up keep their short forms. Everything else goes through the
    engine, all samples at once, or one by one where that cannot be.
    """
    while not graph.is_leaf(value.node):
        below = _step(piece, value.node)
        if below is None:
            return _pulled(piece, value, graph.leaf_tensor(leaf))
        piece = below
        node, output_nr = value.node.next_functions[0]
        assert node is not None
        value = GradientEdge(node, output_nr)
    return piece


def _step(piece: Piece, node: Node) -> Piece | None:
    """Go down by one op, if that keeps the form of the piece or is only a matter of shape."""
    name = graph.op(node)
    if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
        return None
    if name in _SAME:
        return piece
    if name == "TBackward0" and isinstance(piece, Outer):
        return piece.transposed()
    if isinstance(piece, Dense):
        if name == "TBackward0":
            return Dense(piece.values.transpose(1, -1))
        if name in _RESHAPED:
            return Dense(piece.values.reshape(piece.samples, *input_shape(node)))
        if name == "EmbeddingBackward0":
            return _looked_up(piece, node)
    return None


def input_shape(node: Node) -> tuple[int, ...]:
    """Return the shape of the only input of a node."""
    below, output_nr = node.next_functions[0]
    assert below is not None
    if graph.is_leaf(below):
        return tuple(graph.leaf_tensor(below).shape)
    return graph.describe(below)[output_nr].shape


def _looked_up(piece: Dense, node: Node) -> Piece | None:
    """Ids that all samples share, such as positions: the table's gradient touches only those rows."""
    if _torch.saved(node, "scale_grad_by_freq"):
        return None
    table = input_shape(node)
    ids = _torch.saved(node, "indices").reshape(1, -1)
    values = piece.values.reshape(piece.samples, -1, table[1])
    padding = _torch.saved(node, "padding_idx")
    if 0 <= padding < table[0]:
        values = values * (ids != padding)[..., None]
    return Rows(ids.expand(piece.samples, -1), values, table, sparse=_torch.saved(node, "sparse"))


def _pulled(piece: Piece, value: GradientEdge, leaf: Tensor) -> Piece:
    dtype = graph.describe(value.node)[value.output_nr].dtype

    def dense(part: slice) -> Tensor:
        return _torch.pull(value, piece.dense(part).to(dtype), leaf)

    def weighted(weights: Tensor) -> Tensor:
        if dtype in (torch.float16, torch.bfloat16):  # clipped, they may be smaller than half precision can hold
            return Computed(piece.samples, leaf.shape, dense).weighted(weights)
        total = piece.weighted(weights)
        total = total.to_dense() if total.is_sparse else total
        return _torch.pull(value, total.to(dtype)[None], leaf)[0]

    return Computed(piece.samples, leaf.shape, dense, weighted, holds=piece.holds(), how=f"{piece.how}, pulled")


def nothing(samples: int, leaf: Tensor) -> Piece:
    """Return the gradients of no samples at all."""
    return Dense(torch.zeros(samples, *leaf.shape, dtype=leaf.dtype, device=leaf.device))
