"""What is differentiated: one loss per sample, and runs of the engine over their graph."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from . import _engine
from .ownership.layout import SampleLayout
from .ownership.probe import See, probe


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
        silent = set(_engine.bypassed(self.root))
        if not silent:
            return read
        uses = {node: tuple(use for use in found if use.node not in silent) for node, found in read.consumers.items()}
        return replace(read, consumers=uses)

    def visit(self, nodes: Iterable[Node], weights: Tensor, see: See, *, retain_graph: bool = True) -> None:
        """Show the gradients at the outputs of these ops, the loss of each sample times its weight."""
        wanted = dict.fromkeys(nodes)
        # Where checkpoints were opened the engine comes by twice, once to find the gradients inside them.
        above = set() if _engine.bypassed(self.root) else nodes_above(self.read, wanted)
        passed, ends = [n for n in wanted if n in above], [n for n in wanted if n not in above]
        each = weights.to(self.root)[self.sample_of]
        _engine.visit(self.root, each, passed, ends, see, retain_graph=retain_graph)

    def owners(self, nodes: Iterable[Node], *, hooked: bool = False) -> dict[Node, tuple[SampleLayout, ...] | None]:
        """Ask who owns the outputs of these ops; None for an op with an output that samples share.

        With `hooked`, refuse hooks that make the gradient of one sample depend on others.
        """
        found: dict[Node, tuple[SampleLayout, ...] | None] = {}
        for few in _in_groups(nodes):
            found |= {node: self._empty(node) for node in few}
            found |= probe(self.visit, few, self.samples, self.root, hooked=hooked)
        return found

    def _empty(self, node: Node) -> tuple[SampleLayout, ...]:
        return tuple(SampleLayout.empty(self.samples) for _ in graph.describe(node))


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
