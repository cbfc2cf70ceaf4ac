"""The module that made each node.

Two sources: the graph itself, in which a node that uses `fc1.weight` belongs to `fc1`; and `record_modules`,
which observes a forward pass and so also knows the nodes that use no parameter.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from torch import nn
from torch.autograd.graph import Node

from .._torch.nodes import current_sequence_nr, is_leaf, sequence_nr
from ._graph import Graph
from ._names import Names
from ._param_uses import parameter_uses


@dataclass(frozen=True)
class NodeLocation:
    """The module that a node belongs to.

    Attributes:
        module: path of a module, '' for the model itself.
        exact: True if the node was created in that module; False if that is the last known module
            before it.

    Examples:
        >>> str(gradrein.graph.NodeLocation("encoder.0", exact=True))
        'in encoder.0'

    See Also:
        [`gradrein.graph.locate_nodes`][]
    """

    module: str
    exact: bool

    def __str__(self) -> str:
        path = self.module or "the model itself"
        return f"in {path}" if self.exact else f"after {path}"


# Says which module made a node: its path, '' for the model itself, None if that is not known.
ModuleOf: TypeAlias = Callable[[Node], str | None]


@contextmanager
def record_modules(model: nn.Module) -> Generator[ModuleOf, None, None]:
    """Record, while active, which module of `model` creates each node.

    Outside the block a forward pass costs nothing extra: the hooks exist only inside. Each thread numbers its own nodes
    and a node does not know its thread. So if two recorded threads disagree about a number, the module is not known.

    Args:
        model: the model whose forward will run.

    Yields:
        A function from a node to the path of the module that created it: '' for the model itself, None if not recorded.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with graph.record_modules(model) as module_of:
        ...     out = model(torch.ones(1, 2))
        >>> module_of(out.grad_fn)
        '1'

    See Also:
        [`gradrein.graph.locate_nodes`][], [`gradrein.trace`][]
    """
    timelines: list[list[tuple[int, str | None]]] = []  # for each thread: from which number on which module was running
    this_thread = threading.local()

    def mark(path: str | None) -> None:
        """Note that a module begins, or with None that the last one ends."""
        if not hasattr(this_thread, "running"):
            this_thread.running, this_thread.timeline = [None], []
            timelines.append(this_thread.timeline)
        if path is None:
            this_thread.running.pop()
        else:
            this_thread.running.append(path)
        this_thread.timeline.append((current_sequence_nr(), this_thread.running[-1]))

    def module_of(node: Node) -> str | None:
        number = sequence_nr(node)
        at = [bisect_right(timeline, number, key=itemgetter(0)) - 1 for timeline in timelines]
        candidates = {timeline[i][1] for timeline, i in zip(timelines, at, strict=True) if i >= 0} - {None}
        return candidates.pop() if len(candidates) == 1 else None

    handles = []
    for path, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, path=path: mark(path), prepend=True),
            module.register_forward_hook(lambda *_: mark(None), always_call=True),
        ]
    try:
        yield module_of
    finally:
        for handle in handles:
            handle.remove()


def locate_nodes(graph: Graph, names: Names, module_of: ModuleOf | None = None) -> dict[Node, NodeLocation]:
    """Return the module of each node, where known.

    Args:
        graph: a recorded graph.
        names: names of the parameters, from `find_names`.
        module_of: what `record_modules` yielded, if it was active during the forward pass.

    Returns:
        A location for every node that uses a named parameter, was recorded, or comes after such a node.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> read = graph.read(model(torch.ones(1, 2)))
        >>> found = graph.locate_nodes(read, graph.find_names(model))
        >>> [f"{graph.op(node)} {found[node]}" for node in read.nodes if node in found]
        ['ReluBackward0 after 0', 'AddmmBackward0 in 0', 'TBackward0 in 0']

    See Also:
        [`gradrein.graph.record_modules`][], [`gradrein.graph.find_names`][]
    """
    exact = _by_parameters(graph, names)
    if module_of is not None:
        exact |= {node: path for node in graph.nodes if (path := module_of(node)) is not None}
    locations: dict[Node, NodeLocation] = {}
    for node in reversed(graph.nodes):
        if node in exact:
            locations[node] = NodeLocation(exact[node], exact=True)
            continue
        earlier = [used for used, _ in node.next_functions if used is not None and used in locations]
        if earlier:
            locations[node] = NodeLocation(locations[max(earlier, key=sequence_nr)].module, exact=False)
    return locations


def _by_parameters(graph: Graph, names: Names) -> dict[Node, str]:
    owners: dict[Node, list[str]] = {}
    for use in parameter_uses(graph):
        module = names.module_of(use.leaf)
        if module is not None:
            for node in (use.node, *(edge.node for edge in use.relayouts)):
                if not is_leaf(node):
                    owners.setdefault(node, []).append(module)
    return {node: _common_path(paths) for node, paths in owners.items()}


def _common_path(paths: Iterable[str]) -> str:
    """Return the innermost module that contains all of these, such as '' for 'encoder' and 'head'."""
    shared: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
