"""The recorded graph behind a tensor: its nodes in an order that is valid to run, and their consumers."""

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._torch.nodes import Edges, Output, edge_of, is_leaf, leaf_tensor, output_metadata, sequence_nr, walk

# A use of a node's output: the op, which of its inputs, and which output of the node.
Use: TypeAlias = tuple[Node, int, int]


class OutputInfo(NamedTuple):
    """Shape, dtype and device of one output of an op.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.describe((w * 3).grad_fn)[0].shape
        (2,)

    See Also:
        [`gradrein.graph.describe`][]
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Graph:
    """A snapshot of a recorded graph.

    It holds references to torch's nodes and so keeps their saved tensors alive: delete it when done.

    Attributes:
        roots: the edges from which the graph was read.
        nodes: every node reachable from the roots, each before the nodes it sends gradients to. This is the
            order in which torch's engine runs them on one thread.
        consumers: for each node, the uses of its outputs inside this graph, as (op that uses it, which input of that
            op, which output of this node); empty for a root without other uses.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> found = gradrein.graph.read((w * 3).sum())
        >>> len(found.nodes), found.leaves[0] is w
        (3, True)
        >>> [(gradrein.graph.op(op), position) for op, position, _ in found.consumers[found.nodes[-1]]]
        [('MulBackward0', 0)]

    See Also:
        [`gradrein.graph.read`][], [`gradrein.graph.parameter_uses`][]
    """

    roots: tuple[GradientEdge, ...]
    nodes: tuple[Node, ...]
    consumers: dict[Node, tuple[Use, ...]]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The leaf tensors whose ``.grad`` a backward pass over this graph would write."""
        return tuple(leaf_tensor(node) for node in self.nodes if is_leaf(node))

    def leading_to(self, targets: Collection[Node]) -> set[Node]:
        """Return the nodes through which a gradient goes before it reaches the last of the targets."""
        above: set[Node] = set()
        for node in reversed(self.nodes):
            if any(used in targets or used in above for used, _ in node.next_functions if used is not None):
                above.add(node)
        return above


def read(outputs: Output | Iterable[Output]) -> Graph:
    """Read the graph recorded for one or several outputs.

    Outputs that require no gradient have no graph and are left out.

    Args:
        outputs: a tensor, a `GradientEdge`, or several of them.

    Returns:
        The graph, with its nodes in a valid execution order.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> w = torch.ones(2, requires_grad=True)
        >>> [graph.op(node) for node in graph.read((w * 3).sum()).nodes]
        ['SumBackward0', 'MulBackward0', 'AccumulateGrad']

    See Also:
        [`gradrein.graph.walk`][], [`gradrein.graph.op`][], [`gradrein.graph.parameter_uses`][],
        [`gradrein.trace`][]
    """
    listed = (outputs,) if isinstance(outputs, Tensor | GradientEdge) else tuple(outputs)
    roots = tuple(edge_of(o) for o in listed if isinstance(o, GradientEdge) or o.requires_grad)
    edges = walk(roots)
    consumers = _consumers(edges)
    return Graph(roots, _order(edges, consumers), {node: tuple(uses) for node, uses in consumers.items()})


def describe(node: Node) -> tuple[OutputInfo, ...]:
    """Return shape, dtype and device of each output of the op that created `node`.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.describe((w * 3).grad_fn)
        (OutputInfo(shape=(2,), dtype=torch.float32, device=device(type='cpu')),)

    See Also:
        [`gradrein.graph.op`][], [`gradrein.graph.read`][]
    """
    return tuple(OutputInfo(tuple(m.shape), m.dtype, m.device) for m in output_metadata(node))


def _consumers(edges: dict[Node, Edges]) -> dict[Node, list[Use]]:
    consumers: dict[Node, list[Use]] = {node: [] for node in edges}
    for node, used_by_node in edges.items():
        for position, (used, output_nr) in enumerate(used_by_node):
            if used is not None:
                consumers[used].append((node, position, output_nr))
    return consumers


def _order(edges: dict[Node, Edges], consumers: dict[Node, list[Use]]) -> tuple[Node, ...]:
    """Order by dependency, and ready nodes by descending sequence number, as torch's engine does.

    Sequence numbers alone are not enough: each thread counts its own.
    """
    pending = {node: len(uses) for node, uses in consumers.items()}
    discovered = {node: index for index, node in enumerate(edges)}
    ready = [(-sequence_nr(node), discovered[node], node) for node, count in pending.items() if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for used, _ in edges[node]:
            if used is None:
                continue
            pending[used] -= 1
            if pending[used] == 0:
                heapq.heappush(ready, (-sequence_nr(used), discovered[used], used))
    return tuple(order)
