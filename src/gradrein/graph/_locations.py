"""The module that made each node.

Two sources: the graph itself, in which a node that uses `fc1.weight` belongs to `fc1`; and `record_modules`,
which observes a forward pass and so also knows the nodes that use no parameter.
"""

import threading
from bisect import bisect_right
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

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


@dataclass(frozen=True, eq=False)
class ModuleRecord:
    """The module that created each node, from `record_modules`.

    Each thread numbers its own nodes and a node does not know its thread. So if two recorded threads
    disagree about a number, the result is None.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> with gradrein.graph.record_modules(model) as record:
        ...     out = model(torch.ones(3, 2))
        >>> record.module_of(out.grad_fn)
        '0'

    See Also:
        [`gradrein.graph.record_modules`][]
    """

    # For each thread: from which sequence number on which module was running.
    _timelines: list[list[tuple[int, str | None]]] = field(default_factory=list)

    def module_of(self, node: Node) -> str | None:
        """Return the path of the module that created the node, '' for the model itself, None if not recorded."""
        number = sequence_nr(node)
        at = [bisect_right(timeline, number, key=itemgetter(0)) - 1 for timeline in self._timelines]
        candidates = {timeline[i][1] for timeline, i in zip(self._timelines, at, strict=True) if i >= 0} - {None}
        return candidates.pop() if len(candidates) == 1 else None


@contextmanager
def record_modules(model: nn.Module) -> Generator[ModuleRecord, None, None]:
    """Record, while active, which module of `model` creates each node.

    Outside the block a forward pass costs nothing extra: the hooks exist only inside.

    Args:
        model: the model whose forward will run.

    Yields:
        The record. Query it with `ModuleRecord.module_of`.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with graph.record_modules(model) as record:
        ...     out = model(torch.ones(1, 2))
        >>> record.module_of(out.grad_fn)
        '1'

    See Also:
        [`gradrein.graph.locate_nodes`][], [`gradrein.trace`][]
    """
    record = ModuleRecord()
    this_thread = threading.local()

    def mark(path: str | None) -> None:
        """Note that a module begins, or with None that the last one ends."""
        if not hasattr(this_thread, "running"):
            this_thread.running, this_thread.timeline = [None], []
            record._timelines.append(this_thread.timeline)
        if path is None:
            this_thread.running.pop()
        else:
            this_thread.running.append(path)
        this_thread.timeline.append((current_sequence_nr(), this_thread.running[-1]))

    handles = []
    for path, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, path=path: mark(path), prepend=True),
            module.register_forward_hook(lambda *_: mark(None), always_call=True),
        ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def locate_nodes(graph: Graph, names: Names, record: ModuleRecord | None = None) -> dict[Node, NodeLocation]:
    """Return the module of each node, where known.

    Args:
        graph: a recorded graph.
        names: names of the parameters, from `find_names`.
        record: the result of `record_modules`, if it was active during the forward pass.

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
    if record is not None:
        exact |= {node: path for node in graph.nodes if (path := record.module_of(node)) is not None}
    found: dict[Node, NodeLocation] = {}
    for node in reversed(graph.nodes):
        if node in exact:
            found[node] = NodeLocation(exact[node], exact=True)
            continue
        earlier = [used for used, _ in node.next_functions if used is not None and used in found]
        if earlier:
            found[node] = NodeLocation(found[max(earlier, key=sequence_nr)].module, exact=False)
    return found


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
