"""The recorded graph behind a tensor: its nodes in an order that is valid to run, and their consumers."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .._torch import nodes as torch_nodes
from .._torch.nodes import is_leaf, leaf_tensor, output_metadata, sequence_nr

Output: TypeAlias = Tensor | GradientEdge


class Consumer(NamedTuple):
    """One use of a node's output by a later op.

    Attributes:
        node: the op that uses it.
        position: which of that op's inputs it is, as an index into ``node.next_functions``.
        output_nr: which output of the used node it is.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> found = gradrein.graph.read((w * w).sum())
        >>> [use.position for use in found.consumers[found.nodes[-1]]]
        [0, 1]

    See Also:
        [`gradrein.graph.Graph`][], [`gradrein.graph.ParameterUse`][]
    """

    node: Node
    position: int
    output_nr: int


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
        consumers: for each node, the uses of its outputs inside this graph; empty for a root without other
            uses.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> found = gradrein.graph.read((w * 3).sum())
        >>> len(found.nodes), found.leaves[0] is w
        (3, True)

    See Also:
        [`gradrein.graph.read`][], [`gradrein.graph.parameter_uses`][]
    """

    roots: tuple[GradientEdge, ...]
    nodes: tuple[Node, ...]
    consumers: dict[Node, tuple[Consumer, ...]]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The leaf tensors whose ``.grad`` a backward pass over this graph would write."""
        return tuple(leaf_tensor(node) for node in self.nodes if is_leaf(node))


def edge_of(output: Output) -> GradientEdge:
    """Return the edge at which the gradient of a tensor arrives; an edge is returned unchanged.

    Raises:
        ArgumentError: (a ValueError) The tensor requires no gradient.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> gradrein.graph.edge_of(w * 3).node.name()
        'MulBackward0'

    See Also:
        [`gradrein.graph.read`][]
    """
    return output if isinstance(output, GradientEdge) else torch_nodes.edge_of(output)


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
        [`gradrein.graph.reachable`][], [`gradrein.graph.op`][], [`gradrein.graph.parameter_uses`][],
        [`gradrein.trace`][]
    """
    listed = (outputs,) if isinstance(outputs, Tensor | GradientEdge) else tuple(outputs)
    roots = tuple(edge_of(o) for o in listed if isinstance(o, GradientEdge) or o.requires_grad)
    consumers = _discover([edge.node for edge in roots])
    return Graph(roots, _order(consumers), {node: tuple(uses) for node, uses in consumers.items()})


def reachable(outputs: Iterable[Output]) -> list[Node]:
    """Return the nodes that `read` would find, in no particular order; much faster than `read`.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> len(gradrein.graph.reachable([w * 3, w + 1]))
        3

    See Also:
        [`gradrein.graph.read`][]
    """
    stack = [edge_of(o).node for o in outputs if isinstance(o, GradientEdge) or o.requires_grad]
    seen = set(stack)
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in seen:
                seen.add(used)
                stack.append(used)
    return list(seen)


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


def _discover(roots: list[Node]) -> dict[Node, list[Consumer]]:
    consumers: dict[Node, list[Consumer]] = {node: [] for node in roots}
    stack = list(consumers)
    while stack:
        node = stack.pop()
        for position, (used, output_nr) in enumerate(node.next_functions):
            if used is None:
                continue
            if used not in consumers:
                consumers[used] = []
                stack.append(used)
            consumers[used].append(Consumer(node, position, output_nr))
    return consumers


def _order(consumers: dict[Node, list[Consumer]]) -> tuple[Node, ...]:
    """Order by dependency, and ready nodes by descending sequence number, as torch's engine does.

    Sequence numbers alone are not enough: each thread counts its own.
    """
    pending = {node: len(uses) for node, uses in consumers.items()}
    discovered = {node: index for index, node in enumerate(consumers)}
    ready = [(-sequence_nr(node), discovered[node], node) for node, count in pending.items() if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for used, _ in node.next_functions:
            if used is None:
                continue
            pending[used] -= 1
            if pending[used] == 0:
                heapq.heappush(ready, (-sequence_nr(used), discovered[used], used))
    return tuple(order)
