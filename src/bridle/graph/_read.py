"""From a tensor to the recorded graph: nodes in an order that is valid to run, and who consumes whom."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from . import _torch

Output: TypeAlias = Tensor | GradientEdge


class Consumer(NamedTuple):
    """One use of a node's output by a later op.

    Attributes:
        node: the op that uses it.
        position: which of that op's inputs it is, as an index into ``node.next_functions``.
        output_nr: which output of the used node it is.
    """

    node: Node
    position: int
    output_nr: int


class Described(NamedTuple):
    """What torch wrote down about one output of an op."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Graph:
    """A recorded graph, as it was when it was read.

    It holds references to torch's nodes, so it keeps alive what they saved: let it go when done.

    Attributes:
        roots: the edges the reading started from.
        nodes: every node reachable from the roots, each before the nodes it hands gradients to. This is the
            order in which torch's engine runs them on one thread.
        consumers: for each node, the uses of its outputs inside this graph; empty for a root nobody else
            uses.
    """

    roots: tuple[GradientEdge, ...]
    nodes: tuple[Node, ...]
    consumers: dict[Node, tuple[Consumer, ...]]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The leaf tensors whose ``.grad`` a backward pass over this graph would write."""
        return tuple(_torch.leaf_tensor(node) for node in self.nodes if _torch.is_leaf(node))


def edge_of(output: Output) -> GradientEdge:
    """Return the edge at which the gradient of a tensor arrives; an edge is returned as it is."""
    return output if isinstance(output, GradientEdge) else _torch.edge_of(output)


def read(outputs: Output | Iterable[Output]) -> Graph:
    """Read the graph recorded behind one or several outputs.

    Outputs that require no gradient have no graph and are left out.

    Args:
        outputs: a tensor, a `GradientEdge`, or several of them.

    Returns:
        The graph, its nodes in an order that is valid to run.

    Example:
        >>> import torch
        >>> from bridle import graph
        >>> w = torch.ones(2, requires_grad=True)
        >>> [graph.op(node) for node in graph.read((w * 3).sum()).nodes]
        ['SumBackward0', 'MulBackward0', 'AccumulateGrad']
    """
    several = (outputs,) if isinstance(outputs, Tensor | GradientEdge) else tuple(outputs)
    roots = tuple(edge_of(o) for o in several if isinstance(o, GradientEdge) or o.requires_grad)
    consumers = _discover([edge.node for edge in roots])
    return Graph(roots, _order(consumers), {node: tuple(uses) for node, uses in consumers.items()})


def reachable(outputs: Iterable[Output]) -> list[Node]:
    """Return the nodes that `read` would find, in no particular order and in a fraction of its time."""
    stack = [edge_of(o).node for o in outputs if isinstance(o, GradientEdge) or o.requires_grad]
    seen = set(stack)
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in seen:
                seen.add(used)
                stack.append(used)
    return list(seen)


def describe(node: Node) -> tuple[Described, ...]:
    """Return shape, dtype and device of each output of the op that made `node`."""
    return tuple(Described(tuple(m.shape), m.dtype, m.device) for m in _torch.output_metadata(node))


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
    """Order by dependency, and among the nodes that are ready the youngest first, as torch's engine does.

    The sequence number alone would not do: each thread counts for itself.
    """
    waiting = {node: len(uses) for node, uses in consumers.items()}
    found = {node: index for index, node in enumerate(consumers)}
    ready = [(-_torch.sequence_nr(node), found[node], node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        order.append(node)
        for used, _ in node.next_functions:
            if used is None:
                continue
            waiting[used] -= 1
            if waiting[used] == 0:
                heapq.heappush(ready, (-_torch.sequence_nr(used), found[used], used))
    return tuple(order)
