"""Uses of each parameter by ops, seen through views, copies and casts."""

from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._torch.nodes import is_leaf, is_relayout, leaf_tensor
from ._graph import Graph


@dataclass(frozen=True, eq=False)
class ParameterUse:
    """One use of a leaf by one op.

    Attributes:
        leaf: the tensor that is used.
        node: the first op that does more than move, copy or cast it. If the leaf reaches a root
            of the graph without such an op, this is the last node before the root.
        position: which input of that op it is, as an index into ``node.next_functions``; -1 at a
            root.
        relayouts: the views, copies and casts between leaf and op, the one nearest the leaf first. Each is an
            edge: ``output_nr`` says which output (of a split, for example) goes on to the op.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> use = gradrein.graph.parameter_uses(gradrein.graph.read(w.view(2, 1) * 3))[0]
        >>> gradrein.graph.op(use.node), [gradrein.graph.op(edge.node) for edge in use.relayouts]
        ('MulBackward0', ['ViewBackward0'])

    See Also:
        [`gradrein.graph.parameter_uses`][]
    """

    leaf: Tensor
    node: Node
    position: int
    relayouts: tuple[GradientEdge, ...]


def parameter_uses(graph: Graph) -> tuple[ParameterUse, ...]:
    """Return every use of every leaf in the graph.

    A leaf used k times has k entries, so shared weights need no special case.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> layer = torch.nn.Linear(3, 2)
        >>> for use in graph.parameter_uses(graph.read(layer(torch.ones(4, 3)))):
        ...     print(graph.op(use.node), use.position, [graph.op(edge.node) for edge in use.relayouts])
        AddmmBackward0 0 []
        AddmmBackward0 2 ['TBackward0']

    See Also:
        [`gradrein.graph.read`][]
    """
    roots = {(edge.node, edge.output_nr) for edge in graph.roots}
    return tuple(use for node in graph.nodes if is_leaf(node) for use in _uses_of(graph, roots, node))


def _uses_of(graph: Graph, roots: set[tuple[Node, int]], leaf_node: Node) -> list[ParameterUse]:
    leaf = leaf_tensor(leaf_node)
    uses: list[ParameterUse] = []
    # Each entry: a node whose output is still the leaf, and the relayouts up to it.
    stack: list[tuple[Node, tuple[GradientEdge, ...]]] = [(leaf_node, ())]
    while stack:
        node, path = stack.pop()
        uses += [ParameterUse(leaf, node, -1, path) for root, _ in roots if root is node]
        for op, position, output_nr in graph.consumers[node]:
            relayouts = path if node is leaf_node else (*path, GradientEdge(node, output_nr))
            if is_relayout(op):
                stack.append((op, relayouts))
            else:
                uses.append(ParameterUse(leaf, op, position, relayouts))
    return uses
