"""Prove who owns what, from the structure of the recorded graph alone.

Owners are carried from the losses down, op by op, as `ops` says. What is proved holds for every graph of the same
signature, whatever its values, as long as no hook changes a gradient on the way.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch.nodes import edge_shape, output_shapes
from ..layout import UNREACHED, Owners
from ..ops.table import Step


def prove(root: Tensor, sample_of: Sequence[int], *, by_indices: bool = False) -> dict[Node, tuple[Owners, ...]]:
    """Return the owners of every output of every op behind the losses.

    Args:
        root: one loss per entry.
        sample_of: which sample each entry counts for.
        by_indices: follow the indices that this very graph saved, too.
    """
    assert root.grad_fn is not None
    start = Owners.of(torch.tensor(sample_of, dtype=torch.int32, device="cpu").reshape(root.shape), root.shape)
    return _carry(root.grad_fn, root.output_nr, start, by_indices)


def reached(edge: GradientEdge) -> list[Node]:
    """Return the ops that a value is made by: those to which its gradient can go, whatever the values are."""
    sent = _carry(edge.node, edge.output_nr, Owners.all(0, edge_shape(edge)), False)
    return [node for node, owners in sent.items() if not all(o.is_empty for o in owners)]


def _carry(root: Node, output_nr: int, start: Owners, by_indices: bool) -> dict[Node, tuple[Owners, ...]]:
    """Carry owners from one output of a node down to everything below it."""
    nodes = graph.read(GradientEdge(root, output_nr)).nodes
    shapes = output_shapes(nodes)
    nobody = cache(partial(Owners.all, UNREACHED))
    owners_of = {node: [nobody(shape) for shape in outs] for node, outs in shapes.items()}
    owners_of[root][output_nr] = start
    for node in nodes:
        outs = tuple(owners_of[node])
        if all(one.is_empty for one in outs):
            continue
        for position, (below, nr) in enumerate(node.next_functions):
            if below is None:
                continue
            sent = Step(node, outs, position, shapes[below][nr], by_indices).sends()
            before = owners_of[below][nr]
            if not sent.is_empty and before.is_empty:
                owners_of[below][nr] = sent if sent in outs else Owners.of(sent.ids, sent.shape)
            elif not sent.is_empty:
                owners_of[below][nr] = before.merged(sent)
    return {node: tuple(outs) for node, outs in owners_of.items()}
