"""What there is of a recorded graph besides the values of its tensors."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from .nodes import walk
from .saved import KINDS, kind_of


class Scan(NamedTuple):
    """A recorded graph, read in one pass.

    Attributes:
        nodes: every node, each once, in an order that depends on the structure alone.
        leaves: the leaf tensors, by the number of their node.
        custom: the nodes that were made by Python Functions.
        signature: ops, edges, shapes, dtypes, sizes and flags. Two graphs with the same differ in the values of
            their tensors only, and in what Python Functions keep.
    """

    nodes: list[Node]
    leaves: dict[int, Tensor]
    custom: list[Node]
    signature: tuple[Any, ...]


def scan(root: Node | None) -> Scan:
    """Read the graph behind a node; None has none."""
    edges = walk([] if root is None else [root])
    number = {node: i for i, node in enumerate(edges)}
    leaves: dict[int, Tensor] = {}
    custom: list[Node] = []
    facts: list[Any] = []
    for here, (node, below) in enumerate(edges.items()):
        kind = type(node)
        about = KINDS.get(kind) or kind_of(node)
        facts.append(kind)
        if about.is_leaf:
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            leaves[here] = leaf
            facts += (leaf.shape, leaf.dtype)
            continue
        if about.is_custom:
            custom.append(node)
        elif about.is_generic:
            facts.append(node.name())
        facts.append(len(below))
        for used, output_nr in below:
            facts += (None,) if used is None else (number[used], output_nr)
        outputs = node._input_metadata
        facts.append(len(outputs))
        for out in outputs:
            facts += (tuple(out.shape), out.dtype)
        for name in about.values:
            facts.append(getattr(node, name))
    return Scan(list(edges), leaves, custom, _hashable(facts))


def _hashable(facts: list[Any]) -> tuple[Any, ...]:
    signature = tuple(facts)
    try:
        hash(signature)
    except TypeError:  # lists among what nodes saved
        return tuple(_hashable(list(one)) if isinstance(one, list | tuple) else one for one in signature)
    return signature
