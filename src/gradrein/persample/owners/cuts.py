"""Where to cut: the first ops above each parameter whose outputs belong to one sample each.

Below a cut everything is made from parameters alone and shared by all samples: a transposed weight, a
weight-normed one, ``1 + scale``, a table of positions. Above it every element has an owner.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch.nodes import output_shapes
from ..layout.samples import SampleLayout

# Says who owns the outputs of some ops; None for an op with an output that samples share.
OwnersOf: TypeAlias = Callable[[Sequence[Node]], dict[Node, tuple[SampleLayout, ...] | None]]


class UseSite(NamedTuple):
    """A use of a shared value by an op that sees data.

    Attributes:
        op: what torch calls the op.
        node: the op.
        position: which of its inputs the shared value is.
        value: the shared value, as an edge.
        shape: the shape of the value.
        leaves: those of the leaves that were asked about which it is made from.
    """

    op: str
    node: Node
    position: int
    value: GradientEdge
    shape: tuple[int, ...]
    leaves: tuple[Node, ...]


def find_cuts(
    leaves: Collection[Node], read: graph.Graph, owners_of: OwnersOf
) -> tuple[list[UseSite], dict[Node, tuple[SampleLayout, ...]]]:
    """Climb from the leaves until everything has an owner.

    What lies below a shared value is shared as well, even where it happens to get its gradient from one
    sample only (a dead unit may hide the others): what is cut is not passed through a second time.
    """
    owners: dict[Node, tuple[SampleLayout, ...] | None] = {}
    shared: dict[Node, None] = dict.fromkeys(leaves)
    below: set[Node] = set()
    frontier = list(shared)
    # A view, copy or cast of something shared is taken as shared unasked: to ask would make the engine
    # compute whole weight gradients. An expansion is where a token or table meets the batch.
    relayouts = {node: graph.op(node) != "ExpandBackward0" for node in read.nodes if graph.is_relayout(node)}
    while frontier:
        asked = [node for node in _above(read, frontier, relayouts) if node not in owners]
        owners |= {node: None for node in asked if relayouts.get(node)}
        owners |= owners_of([node for node in asked if not relayouts.get(node)])
        consumers = {consumer.node for node in shared for consumer in read.consumers[node]}
        used = [one for node in consumers if owners[node] is None for one, _ in node.next_functions if one is not None]
        below.update(graph.walk([one for one in used if one not in below], is_end=below.__contains__))
        frontier = [node for node in consumers if (owners[node] is None or node in below) and node not in shared]
        shared |= dict.fromkeys(frontier)
    cuts = _use_sites(shared, read, leaves)
    layouts = {cut.node: layouts for cut in cuts if (layouts := owners[cut.node]) is not None}
    return cuts, layouts


def _use_sites(shared: Collection[Node], read: graph.Graph, leaves: Collection[Node]) -> list[UseSite]:
    """Return the uses of shared values by ops whose outputs are not shared."""
    shapes = output_shapes(shared)
    uses = [(node, use) for node in shared for use in read.consumers[node] if use.node not in shared]
    ops = [graph.op(use.node) for _, use in uses]
    beneath = [tuple(one for one in graph.walk([node]) if one in leaves) for node, _ in uses]
    return [
        UseSite(op, use.node, use.position, GradientEdge(node, use.output_nr), shapes[node][use.output_nr], found)
        for op, (node, use), found in zip(ops, uses, beneath, strict=True)
    ]


def _above(read: graph.Graph, nodes: Iterable[Node], relayouts: Mapping[Node, bool]) -> list[Node]:
    """Return the consumers of these nodes; behind a view or cast also the consumers of that."""
    found: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        for consumer in read.consumers[stack.pop()]:
            if consumer.node not in found:
                found[consumer.node] = None
                if consumer.node in relayouts:
                    stack.append(consumer.node)
    return list(found)
