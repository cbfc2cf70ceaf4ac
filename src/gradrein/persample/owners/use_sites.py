"""Where parameters meet the data: the first ops above each parameter whose outputs belong to one sample each.

There the graph is cut. Below a cut everything is made from parameters alone and shared by all samples: a transposed
weight, a weight-normed one, ``1 + scale``, a table of positions. Above it every element has an owner.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch.autograd.graph import Node

from ... import graph
from ..._torch.nodes import output_shapes
from ..engine import Losses
from ..layout import Owners

# Says who owns the outputs of some ops; None for an op with an output that samples share.
OwnersOf: TypeAlias = Callable[[Sequence[Node]], dict[Node, tuple[Owners, ...] | None]]


class UseSite(NamedTuple):
    """A use of a shared value by an op that sees data; nodes are numbers in `Scan.nodes`.

    Attributes:
        op: what torch calls the op.
        node: the op.
        position: which of its inputs the shared value is.
        value: the node that made the value.
        output_nr: which of the outputs of that node it is.
        shape: the shape of the value.
        leaves: those of the leaves that were asked about which it is made from.
    """

    op: str
    node: int
    position: int
    value: int
    output_nr: int
    shape: tuple[int, ...]
    leaves: tuple[int, ...]


def find_use_sites(
    leaves: Collection[int], losses: Losses, owners_of: OwnersOf
) -> tuple[list[UseSite], dict[int, tuple[Owners, ...]]]:
    """Climb from the leaves until everything has an owner.

    What lies below a shared value is shared as well, even where it happens to get its gradient from one
    sample only (a dead unit may hide the others): what is cut is not passed through a second time.
    """
    read = losses.read
    owners: dict[Node, tuple[Owners, ...] | None] = {}
    shared: dict[Node, None] = dict.fromkeys(losses.scan.nodes[i] for i in leaves)
    below: set[Node] = set()
    frontier = list(shared)
    # A view, copy or cast of something shared is taken as shared, unobserved: to observe it would make the engine
    # compute whole weight gradients. An expansion is where a token or table meets the batch.
    relayouts = {node: graph.op(node) != "ExpandBackward0" for node in read.nodes if graph.is_relayout(node)}
    while frontier:
        new = [node for node in _above(read, frontier, relayouts) if node not in owners]
        owners |= {node: None for node in new if relayouts.get(node)}
        owners |= owners_of([node for node in new if not relayouts.get(node)])
        consumers = {op for node in shared for op, _, _ in read.consumers[node]}
        used = [one for node in consumers if owners[node] is None for one, _ in node.next_functions if one is not None]
        below.update(graph.walk([one for one in used if one not in below], is_end=below.__contains__))
        frontier = [node for node in consumers if (owners[node] is None or node in below) and node not in shared]
        shared |= dict.fromkeys(frontier)
    uses = _use_sites(shared, losses, leaves)
    nodes = losses.scan.nodes
    return uses, {use.node: outs for use in uses if (outs := owners[nodes[use.node]]) is not None}


def _use_sites(shared: Collection[Node], losses: Losses, leaves: Collection[int]) -> list[UseSite]:
    """Return the uses of shared values by ops whose outputs are not shared."""
    number, shapes = losses.number, output_shapes(shared)
    uses = []
    for node in shared:
        beneath = [number[one] for one in graph.walk([node])]
        for op, position, output_nr in losses.read.consumers[node]:
            if op not in shared:
                made_from = tuple(i for i in beneath if i in leaves)
                value = number[node], output_nr, shapes[node][output_nr]
                uses.append(UseSite(graph.op(op), number[op], position, *value, made_from))
    return uses


def _above(read: graph.Graph, nodes: Iterable[Node], relayouts: Mapping[Node, bool]) -> list[Node]:
    """Return the consumers of these nodes; behind a view or cast also the consumers of that."""
    above: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        for op, _, _ in read.consumers[stack.pop()]:
            if op not in above:
                above[op] = None
                if op in relayouts:
                    stack.append(op)
    return list(above)
