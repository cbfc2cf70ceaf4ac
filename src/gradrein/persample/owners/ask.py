"""Ask the engine who owns the outputs of ops, a few at a time where their gradients are large."""

from collections.abc import Iterable, Iterator
from math import prod

from torch.autograd.graph import Node

from ... import graph
from ..engine import Losses
from ..layout.samples import SampleLayout
from .probe import probe

# To ask about an op takes holding its gradient. More than this many bytes are asked for in several runs of the
# engine, but not in many.
_HELD_BYTES = 1 << 26
_GROUPS_AT_MOST = 4


def ask(losses: Losses, nodes: Iterable[Node], *, custom: bool = False) -> dict[Node, tuple[SampleLayout, ...] | None]:
    """Ask who owns the outputs of these ops; None for an op with an output that samples share.

    With `custom`, refuse custom Functions that make the gradient of one sample depend on others.
    """
    found: dict[Node, tuple[SampleLayout, ...] | None] = {}
    for few in _in_groups(nodes):
        found |= {node: tuple(SampleLayout.empty(losses.samples) for _ in graph.describe(node)) for node in few}
        found |= probe(losses.visit, few, losses.samples, losses.root, custom=custom)
    return found


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
