"""From a shared value down to the parameter it is made from."""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch.nodes import edge_shape
from . import engine
from .gate.hooks import as_at_the_call
from .representations.base import Computed, SampleGrads
from .representations.members import Members
from .representations.rows import Rows

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


def pull_back(form: SampleGrads, value: GradientEdge, leaf: Node) -> SampleGrads:
    """Return per-sample gradients of the leaf, given those of a value made from it.

    A transposed weight, a cast one and a look-up keep their short forms. Everything else goes through the
    engine, all samples at once, or one by one where that cannot be.
    """
    while value.node is not leaf:
        below = _step(form, value.node)
        if below is None:
            return _through_engine(form, value, leaf)
        form = below
        node, output_nr = value.node.next_functions[0]
        assert node is not None
        value = GradientEdge(node, output_nr)
    return form


def _step(form: SampleGrads, node: Node) -> SampleGrads | None:
    """Go down by one op, if the gradients can stay in their form."""
    name = node.name()
    if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
        return None
    if name in _SAME:
        return form
    if name == "TBackward0":
        return form.swapped((-2, -1)) if len(form.shape) == 2 else form
    if name == "TransposeBackward0":
        return form.swapped(_swapped(node))
    factors = form.outer_factors()
    if name == "SelectBackward0" and factors is not None and engine.saved_number(node, "dim") % 3 == 0:
        count = _input_shape(node)[0]
        return Members.of(*factors, engine.saved_number(node, "index") % count, count)
    if name in _RESHAPED:
        return form.reshaped(_input_shape(node))
    if form.stored is not None and name == "EmbeddingBackward0":
        return _looked_up(form.stored, node)
    return None


def _swapped(node: Node) -> tuple[int, int]:
    """Return the two dimensions that were swapped, counted from the last."""
    rank = len(graph.describe(node)[0].shape)
    first, second = sorted(engine.saved_number(node, name) % rank - rank for name in ("dim0", "dim1"))
    return first, second


def _input_shape(node: Node) -> tuple[int, ...]:
    """Return the shape of the only input of a node."""
    below, output_nr = node.next_functions[0]
    assert below is not None
    return edge_shape(GradientEdge(below, output_nr))


def _looked_up(stored: Tensor, node: Node) -> SampleGrads | None:
    """Ids that all samples share, such as positions: the table's gradient touches only those rows."""
    if engine.saved(node, "scale_grad_by_freq"):
        return None
    table = _input_shape(node)
    ids = engine.saved(node, "indices").reshape(1, -1)
    values = stored.reshape(len(stored), -1, table[1])
    padding = engine.saved(node, "padding_idx")
    if 0 <= padding < table[0]:
        values = values * (ids != padding)[..., None]
    return Rows(ids.expand(len(stored), -1), values, table, sparse=engine.saved(node, "sparse"))


def _through_engine(form: SampleGrads, value: GradientEdge, leaf: Node) -> SampleGrads:
    shape, below = graph.leaf_tensor(leaf).shape, GradientEdge(leaf, 0)
    dtype = graph.describe(value.node)[value.output_nr].dtype
    check = as_at_the_call(value)

    def pull(gradients: Tensor) -> Tensor:
        check()
        return engine.pull(value, gradients.to(dtype), below)

    def dense(part: slice) -> Tensor:
        return pull(form.dense(part))

    def weighted(weights: Tensor) -> Tensor:
        if dtype in (torch.float16, torch.bfloat16):  # clipped, they may be smaller than half precision can hold
            return Computed(form.samples, shape, dense).weighted(weights)
        total = form.weighted(weights)
        total = total.to_dense() if total.is_sparse else total
        return pull(total[None])[0]

    strategy = f"{form.strategy}, pulled"
    return Computed(form.samples, shape, dense, weighted, held_tensors=form.held_tensors, strategy=strategy)
