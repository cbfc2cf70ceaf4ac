"""Which ops use which parameter, seen through the views, copies and casts that lie between."""

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from . import _torch
from ._read import Graph


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a leaf by one op.

    Attributes:
        leaf: the tensor that is used.
        node: the first op that does more with it than move, copy, cut or cast it. When the leaf reaches the
            end of the graph without such an op, this is the last node before the end.
        position: which input of that op it is, as an index into ``node.next_functions``; -1 at the end of the
            graph.
        relayouts: the views, copies and casts between leaf and op, the one nearest the leaf first. Each is an
            edge: ``output_nr`` says which output of, for example, a split goes on to the op.
    """

    leaf: Tensor
    node: Node
    position: int
    relayouts: tuple[GradientEdge, ...]


def uses(graph: Graph) -> tuple[Use, ...]:
    """Return every use of every leaf in the graph.

    A leaf used k times has k entries, so shared weights need no special care.

    Example:
        >>> import torch
        >>> from bridle import graph
        >>> layer = torch.nn.Linear(3, 2)
        >>> for use in graph.uses(graph.read(layer(torch.ones(4, 3)))):
        ...     print(graph.op(use.node), use.position, [graph.op(edge.node) for edge in use.relayouts])
        AddmmBackward0 0 []
        AddmmBackward0 2 ['TBackward0']
    """
    ends = {(edge.node, edge.output_nr) for edge in graph.roots}
    found: list[Use] = []
    for node in graph.nodes:
        if _torch.is_leaf(node):
            found += _climb(graph, ends, node)
    return tuple(found)


def _climb(graph: Graph, ends: set[tuple[Node, int]], leaf_node: Node) -> list[Use]:
    leaf = _torch.leaf_tensor(leaf_node)
    found: list[Use] = []
    # Each entry: a node whose output is still the leaf, which output if only one is meant, and the way up to
    # it.
    stack: list[tuple[Node, tuple[GradientEdge, ...]]] = [(leaf_node, ())]
    while stack:
        node, path = stack.pop()
        found += [Use(leaf, node, -1, path) for end, _ in ends if end is node]
        for consumer in graph.consumers[node]:
            way = path if node is leaf_node else (*path, GradientEdge(node, consumer.output_nr))
            if _torch.is_relayout(consumer.node):
                stack.append((consumer.node, way))
            else:
                found.append(Use(leaf, consumer.node, consumer.position, way))
    return found
