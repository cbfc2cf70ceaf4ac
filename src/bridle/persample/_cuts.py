"""Where to cut: the first ops above each parameter whose outputs belong to one sample each.

Below a cut everything is made from parameters alone and shared by all samples: a transposed weight, a
weight-normed one, ``1 + scale``, a table of positions. Above it every element has an owner.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from . import _torch
from ._owners import Layout
from ._probe import See, probe

# Says who owns the outputs of some ops; None for an op with an output that samples share.
OwnersOf: TypeAlias = Callable[[Sequence[Node]], dict[Node, tuple[Layout, ...] | None]]


@dataclass(frozen=True, eq=False)
class Cut:
    """A use of a shared value by an op that sees data.

    Attributes:
        node: the op.
        position: which of its inputs the shared value is.
        value: the shared value, as an edge.
    """

    node: Node
    position: int
    value: GradientEdge


@dataclass(frozen=True, eq=False)
class Losses:
    """What is differentiated.

    Attributes:
        root: one loss per entry.
        sample_of: which sample each entry counts for.
        samples: how many samples there are.
    """

    root: Tensor
    sample_of: Tensor
    samples: int

    @cached_property
    def read(self) -> graph.Graph:
        """The graph recorded behind the losses, without what hands on nothing."""
        read = graph.read(self.root)
        silent = set(_torch.passed_by(self.root))
        if not silent:
            return read
        uses = {node: tuple(use for use in found if use.node not in silent) for node, found in read.consumers.items()}
        return replace(read, consumers=uses)

    def visit(self, nodes: Iterable[Node], weights: Tensor, see: See, *, retain_graph: bool = True) -> None:
        """Show the gradients at the outputs of these ops, the loss of each sample times its weight."""
        wanted = dict.fromkeys(nodes)
        # Where checkpoints were opened the engine comes by twice, once to find the gradients inside them.
        above = set() if _torch.passed_by(self.root) else nodes_above(self.read, wanted)
        passed, ends = [n for n in wanted if n in above], [n for n in wanted if n not in above]
        each = weights.to(self.root)[self.sample_of]
        _torch.visit(self.root, each, passed, ends, see, retain_graph=retain_graph)

    def owners(self, nodes: Iterable[Node], *, hooked: bool = False) -> dict[Node, tuple[Layout, ...] | None]:
        """Ask who owns the outputs of these ops; None for an op with an output that samples share.

        With `hooked`, refuse hooks that make the gradient of one sample depend on others.
        """
        found: dict[Node, tuple[Layout, ...] | None] = {}
        for few in _in_groups(nodes):
            found |= {node: self._nobodys(node) for node in few}
            found |= probe(self.visit, few, self.samples, self.root, hooked=hooked)
        return found

    def _nobodys(self, node: Node) -> tuple[Layout, ...]:
        return tuple(Layout.of_nobody(self.samples) for _ in graph.describe(node))


# To ask about an op takes holding its gradient. More than this many bytes are asked for in several runs of the
# engine, but not in many.
_HELD_BYTES = 1 << 26
_GROUPS_AT_MOST = 4


def _in_groups(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    sizes = {node: sum(4 * prod(out.shape) for out in graph.describe(node)) for node in nodes}
    limit = max(_HELD_BYTES, sum(sizes.values()) / _GROUPS_AT_MOST)
    group: list[Node] = []
    held = 0
    for node, size in sizes.items():
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(node)
        held += size
    if group:
        yield group


def nodes_above(read: graph.Graph, targets: Collection[Node]) -> set[Node]:
    """Return the ops through which the gradient goes before it reaches the last of the targets."""
    above: set[Node] = set()
    for node in reversed(read.nodes):
        if any(below in targets or below in above for below, _ in node.next_functions if below is not None):
            above.add(node)
    return above


def find_cuts(
    leaves: Iterable[Node], read: graph.Graph, owners_of: OwnersOf
) -> tuple[list[Cut], dict[Node, tuple[Layout, ...]]]:
    """Climb from the leaves until everything has an owner.

    What lies below a shared value is shared as well, even where it happens to get its gradient from one
    sample only (a dead unit may hide the others): what is cut is not passed through a second time.
    """
    owners: dict[Node, tuple[Layout, ...] | None] = {}
    shared: dict[Node, None] = dict.fromkeys(leaves)
    below: set[Node] = set()
    frontier = list(shared)
    while frontier:
        asked = [node for node in _above(read, frontier) if node not in owners]
        # A view, copy or cast of something shared is taken as shared unasked: to ask would make the engine
        # compute whole weight gradients. An expansion is where a token or table meets the batch.
        owners |= {node: None for node in asked if _is_view(node)}
        owners |= owners_of([node for node in asked if not _is_view(node)])
        consumers = {consumer.node for node in shared for consumer in read.consumers[node]}
        for node in consumers:
            if owners[node] is None:
                _add_below(node, below)
        frontier = [node for node in consumers if (owners[node] is None or node in below) and node not in shared]
        shared |= dict.fromkeys(frontier)
    cuts = [
        Cut(consumer.node, consumer.position, GradientEdge(node, consumer.output_nr))
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


def _is_view(node: Node) -> bool:
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
