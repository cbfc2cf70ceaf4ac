"""Where to cut: the first ops above each parameter whose outputs belong to one sample each.

Below a cut everything is made from parameters alone and shared by all samples: a transposed weight, a
weight-normed one, ``1 + scale``, a table of positions. Above it every element has an owner.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.autograd.graph import GradientEdge, Node

from ... import graph
from .layout import SampleLayout

# Says who owns the outputs of some ops; None for an op with an output that samples share.
OwnersOf: TypeAlias = Callable[[Sequence[Node]], dict[Node, tuple[SampleLayout, ...] | None]]


@dataclass(frozen=True, eq=False)
class UseSite:
    """A use of a shared value by an op that sees data.

    Attributes:
        node: the op.
        position: which of its inputs the shared value is.
        value: the shared value, as an edge.
    """

    node: Node
    position: int
    value: GradientEdge


def find_cuts(
    leaves: Iterable[Node], read: graph.Graph, owners_of: OwnersOf
) -> tuple[list[UseSite], dict[Node, tuple[SampleLayout, ...]]]:
    """Climb from the leaves until everything has an owner.

    What lies below a shared value is shared as well, even where it happens to get its gradient from one
    sample only (a dead unit may hide the others): what is cut is not passed through a second time.
    """
    owners: dict[Node, tuple[SampleLayout, ...] | None] = {}
    shared: dict[Node, None] = dict.fromkeys(leaves)
    below: set[Node] = set()
    frontier = list(shared)
    while frontier:
        asked = [node for node in _above(read, frontier) if node not in owners]
        # A view, copy or cast of something shared is taken as shared unasked: to ask would make the engine
        # compute whole weight gradients. An expansion is where a token or table meets the batch.
        owners |= {node: None for node in asked if _is_relayout(node)}
        owners |= owners_of([node for node in asked if not _is_relayout(node)])
        consumers = {consumer.node for node in shared for consumer in read.consumers[node]}
        for node in consumers:
            if owners[node] is None:
                _add_below(node, below)
        frontier = [node for node in consumers if (owners[node] is None or node in below) and node not in shared]
        shared |= dict.fromkeys(frontier)
    cuts = [
        UseSite(consumer.node, consumer.position, GradientEdge(node, consumer.output_nr))
        for node in shared
        for consumer in read.consumers[node]
        if consumer.node not in shared
    ]
    layouts = {cut.node: layouts for cut in cuts if (layouts := owners[cut.node]) is not None}
    return cuts, layouts


def _above(read: graph.Graph, nodes: Iterable[Node]) -> list[Node]:
    """Return the consumers of these nodes; behind a view or cast also the consumers of that."""
    found: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        for consumer in read.consumers[stack.pop()]:
            if consumer.node not in found:
                found[consumer.node] = None
                if graph.is_relayout(consumer.node):
                    stack.append(consumer.node)
    return list(found)


def _is_relayout(node: Node) -> bool:
    return graph.is_relayout(node) and graph.op(node) != "ExpandBackward0"


def _add_below(node: Node, below: set[Node]) -> None:
    stack = [node]
    while stack:
        for used, _ in stack.pop().next_functions:
            if used is not None and used not in below:
                below.add(used)
                stack.append(used)


def leaves_below(node: Node) -> list[Node]:
    """Return the leaves that a shared value is made from."""
    found: dict[Node, None] = {}
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        if graph.is_leaf(top):
            found[top] = None
        for below, _ in top.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return list(found)
