"""Prove who owns what, from the structure of the recorded graph alone.

Owners are carried from the losses down, op by op, as `ops` says. What is proved holds for every graph of the same
signature, whatever its values, as long as no hook changes a gradient on the way.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..._torch.nodes import edge_shape, output_shapes
from ..layout.owners import UNREACHED, Owners
from ..ops.step import Step

# Where a node sends gradients: the input of its op, and the edge there.
_Sends = list[tuple[int, Node, int]]


def prove(root: Tensor, sample_of: Tensor, *, by_indices: bool = False) -> dict[Node, tuple[Owners, ...]]:
    """Return the owners of every output of every op behind the losses.

    Args:
        root: one loss per entry.
        sample_of: which sample each entry counts for.
        by_indices: follow the indices that this very graph saved, too.
    """
    assert root.grad_fn is not None
    sends = _all_sends(root.grad_fn)
    start = Owners.of(sample_of.to("cpu", torch.int32).reshape(root.shape), root.shape)
    return _carry(sends, root.grad_fn, root.output_nr, start, by_indices)


def reached(edge: GradientEdge) -> list[Node]:
    """Return the ops that a value is made by: those to which its gradient can go, whatever the values are."""
    found = _carry(_all_sends(edge.node), edge.node, edge.output_nr, Owners.all(0, edge_shape(edge)), False)
    return [node for node, owners in found.items() if not all(o.is_empty for o in owners)]


def _carry(
    sends: dict[Node, _Sends], root: Node, output_nr: int, start: Owners, by_indices: bool
) -> dict[Node, tuple[Owners, ...]]:
    shapes = output_shapes(sends)
    found: dict[Node, list[Owners | None]] = {node: [None] * len(outs) for node, outs in shapes.items()}
    found[root][output_nr] = start
    for node in _in_order(sends, root):
        if not any(found[node]):
            continue
        outs = _all_outputs(found[node], shapes[node])
        for position, below, nr in sends[node]:
            sent = Step(node, outs, position, shapes[below][nr], by_indices).sends()
            before = found[below][nr]
            if not sent.is_empty:
                found[below][nr] = sent.folded() if before is None else before.merged(sent)
    return {node: _all_outputs(owners, shapes[node]) for node, owners in found.items()}


def _all_outputs(owners: list[Owners | None], shapes: list[tuple[int, ...]]) -> tuple[Owners, ...]:
    """Return owners of all outputs, also of those that no loss was found to reach."""
    return tuple(
        Owners.all(UNREACHED, shape) if one is None else one for one, shape in zip(owners, shapes, strict=True)
    )


def _all_sends(root: Node) -> dict[Node, _Sends]:
    sends: dict[Node, _Sends] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node not in sends:
            sends[node] = [(i, below, nr) for i, (below, nr) in enumerate(node.next_functions) if below is not None]
            stack += [below for _, below, _ in sends[node]]
    return sends


def _in_order(sends: dict[Node, _Sends], root: Node) -> Iterable[Node]:
    waiting = dict.fromkeys(sends, 0)
    for targets in sends.values():
        for _, below, _ in targets:
            waiting[below] += 1
    ready = [root]
    while ready:
        node = ready.pop()
        yield node
        for _, below, _ in sends[node]:
            waiting[below] -= 1
            if not waiting[below]:
                ready.append(below)
