"""Our own engine: a backward pass in plain Python over the nodes torch recorded."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from ..errors import ReplayError
from . import _torch
from ._arguments import Gradients, as_outputs, gradients_for
from ._refuse import refuse_unreplayable
from ._run import Output


class Edge(NamedTuple):
    """The way of one gradient from one node to another.

    Attributes:
        source: the node that computed the gradient; None where the pass starts.
        position: which of the source's inputs it belongs to, as an index into ``source.next_functions``;
            where the pass starts, the index of the output.
        target: the node that takes the gradient.
        output_nr: which output of the target's op it belongs to.
    """

    source: Node | None
    position: int
    target: Node
    output_nr: int


Visitor: TypeAlias = Callable[[Edge, Tensor], Tensor | None]


def replay(
    outputs: Output | Iterable[Output],
    inputs: Output | Iterable[Output],
    grad_outputs: Gradients = None,
    *,
    create_graph: bool = False,
    visit: Visitor | None = None,
) -> tuple[Tensor | None, ...]:
    """Differentiate as `torch.autograd.grad` does, one node at a time in Python, and show every gradient.

    The result is that of torch's engine bit for bit, unless `visit` changes a gradient on its way. The graph
    is kept, ``.grad`` is left alone, and hooks on tensors and nodes run. One thing is not as in torch: the
    nodes do not run inside one engine call, so a hook that waits for several tensors
    (`torch.autograd.graph.register_multi_grad_hook`) does not fire.

    Args:
        outputs: one or several tensors or edges to differentiate.
        inputs: one or several tensors or edges to differentiate with respect to.
        grad_outputs: the gradient each output starts from; None stands for one, which only a real scalar has.
        create_graph: make the result differentiable.
        visit: called as ``visit(edge, gradient)`` for every gradient that goes over an edge, before gradients
            that meet are added. It may return a gradient to send instead, of the same shape and dtype.

    Returns:
        One gradient per input; None for an input the outputs do not depend on.

    Raises:
        ReplayError: the graph holds something that cannot be replayed right, such as a reentrant checkpoint
            or a model under distributed training; or an output or input has no graph.
        BackwardError: a gradient is missing or does not fit its output.

    Example:
        What would the gradient be if nothing came back through the exponential?

        >>> import torch, bridle
        >>> from bridle import graph
        >>> x = torch.tensor(0.5, requires_grad=True)
        >>> y = x.exp() + 3 * x
        >>> def cut(edge, gradient):
        ...     if edge.source is not None and graph.op(edge.source) == "ExpBackward0":
        ...         return torch.zeros_like(gradient)
        >>> bridle.autograd.replay(y, x, visit=cut)
        (tensor(3.),)
    """
    starts, wanted = as_outputs(outputs), as_outputs(inputs)
    for kind, tensors in (("output", starts), ("input", wanted)):
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                raise ReplayError(f"{kind} {index} does not require grad, so no graph was recorded for it.")
    read = graph.read(starts)
    refuse_unreplayable(read)
    grads = gradients_for(starts, grad_outputs, batched=False)
    return run(read, wanted, grads, create_graph=create_graph, visit=visit)


def run(
    read: graph.Graph,
    inputs: tuple[Output, ...],
    grads: tuple[Tensor | None, ...],
    *,
    create_graph: bool = False,
    visit: Visitor | None = None,
) -> tuple[Tensor | None, ...]:
    """Run every node of the graph that leads to an input, each when all its gradients have come in."""
    wanted = [graph.edge_of(tensor) for tensor in inputs]
    targets = {edge.node for edge in wanted}
    leading = _nodes_leading_to(targets, read)
    passing = _Pass({node: index for index, node in enumerate(read.nodes)}, create_graph, visit)
    found: dict[tuple[Node, int], Tensor | None] = {}
    with _torch.checkpoints_recomputed_once(), torch.set_grad_enabled(create_graph):
        for index, (root, gradient) in enumerate(zip(read.roots, grads, strict=True)):
            passing.send(Edge(None, index, root.node, root.output_nr), gradient)
        for node in read.nodes:  # already in an order in which every node has its gradients before it runs
            incoming = passing.collect(node)
            if node in targets:
                # As in torch: an input that the pass goes through is caught before the hooks of its tensor.
                caught = incoming if node in leading else through_tensor_hooks(node, incoming, create_graph)
                found |= {(node, number): grad for number, grad in enumerate(caught)}
            if node in leading:
                for position, outgoing in enumerate(passing.execute(node, incoming)):
                    target, output_nr = node.next_functions[position]
                    if target is not None and (target in leading or target in targets):
                        passing.send(Edge(node, position, target, output_nr), outgoing)
    return tuple(found.get((edge.node, edge.output_nr)) for edge in wanted)


@dataclass
class _Pass:
    """The gradients on their way."""

    order: dict[Node, int]
    create_graph: bool
    visit: Visitor | None
    waiting: dict[Node, list[Tensor | None]] = field(default_factory=dict)

    def send(self, edge: Edge, gradient: Tensor | None) -> None:
        """Bring a gradient to its target, and add it to what is already there."""
        if gradient is None:
            return
        gradient = _torch.fit(gradient, edge.target, edge.output_nr)
        if self.visit is not None:
            gradient = _visited(self.visit, edge, gradient)
        slots = self.waiting.setdefault(edge.target, [None] * _torch.output_count(edge.target))
        earlier = slots[edge.output_nr]
        if earlier is None:
            slots[edge.output_nr] = gradient
        else:  # a sparse gradient can be added to a dense one, not the other way round
            sparse = earlier.layout != torch.strided
            slots[edge.output_nr] = gradient + earlier if sparse else earlier + gradient

    def collect(self, node: Node) -> list[Tensor | None]:
        """Return what has come in for a node, None for an output nobody sent a gradient to."""
        return self.waiting.pop(node, None) or [None] * _torch.output_count(node)

    def execute(self, node: Node, incoming: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run one node, with its hooks, and return one gradient per input of its op."""
        if graph.is_custom(node):
            return self._execute_custom(node, incoming)
        gradients = tuple(through_tensor_hooks(node, incoming, self.create_graph))
        for before in _torch.hooks_before(node):
            gradients = _or(before(gradients), gradients)
        result = node(*gradients)  # type: ignore[operator]
        outgoing: tuple[Tensor | None, ...] = result if isinstance(result, tuple) else (result,)
        after_hooks = _torch.hooks_after(node)
        if after_hooks:
            outgoing = tuple(
                gradient if gradient is None or used is None else _torch.fit(gradient, used, output_nr)
                for gradient, (used, output_nr) in zip(outgoing, node.next_functions, strict=True)
            )
        for after in after_hooks:
            outgoing = _or(after(outgoing, gradients), outgoing)
        return outgoing

    def _execute_custom(self, node: Node, incoming: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run one node of a Python Function on torch's engine, alone.

        Only there is it known whether the Function wants zeros or None for a gradient that did not come.
        """
        outgoing: list[tuple[Tensor | None, ...]] = []
        starts = {number: gradient for number, gradient in enumerate(incoming) if gradient is not None}
        handles = [node.register_hook(lambda grad_inputs, _: outgoing.append(grad_inputs))]
        if not starts:  # the engine does not start from nothing: give it zeros, and take them away at the node
            starts = {0: _torch.zeros_for(node, 0)}
            handles.append(node.register_prehook(lambda grads: (None,) * len(grads)))
        used = [(child, number) for child, number in node.next_functions if child is not None]
        # The engine is to stop at the first child in line: no way leads there through another child, so
        # nothing but this node runs.
        child, number = min(used, key=lambda edge: self.order[edge[0]])
        try:
            edges = [GradientEdge(node, number) for number in starts]
            _engine(edges, list(starts.values()), [GradientEdge(child, number)], self.create_graph)
        finally:
            for handle in handles:
                handle.remove()
        return outgoing[0]


def _nodes_leading_to(targets: set[Node], read: graph.Graph) -> set[Node]:
    leading: set[Node] = set()
    for node in reversed(read.nodes):
        if any(used in targets or used in leading for used, _ in node.next_functions):
            leading.add(node)
    return leading


def _visited(visit: Visitor, edge: Edge, gradient: Tensor) -> Tensor:
    replaced = visit(edge, gradient)
    if replaced is None:
        return gradient
    if replaced.shape != gradient.shape or replaced.dtype != gradient.dtype:
        raise ReplayError(
            f"visit returned a gradient of shape {tuple(replaced.shape)} and {replaced.dtype} for an edge "
            f"into {graph.op(edge.target)} that carries shape {tuple(gradient.shape)} and {gradient.dtype}."
        )
    return replaced


def _engine(
    starts: list[GradientEdge], grads: list[Tensor], ends: list[GradientEdge], create_graph: bool
) -> tuple[Tensor | None, ...]:
    return _torch.run_engine(starts, grads, True, create_graph, ends, allow_unreachable=True, accumulate=False)


def through_tensor_hooks(node: Node, incoming: list[Tensor | None], create_graph: bool) -> list[Tensor | None]:
    """Let the hooks of the tensors this node made see, and change, their gradients.

    An engine call that ends where it starts does nothing else than that.
    """
    there = {number: gradient for number, gradient in enumerate(incoming) if gradient is not None}
    if not there:
        return incoming
    edges = [GradientEdge(node, number) for number in there]
    hooked = dict(zip(there, _engine(edges, list(there.values()), edges, create_graph), strict=True))
    return [hooked.get(number) for number in range(len(incoming))]


def _or(
    replaced: tuple[Tensor | None, ...] | Tensor | None, before: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    if replaced is None:
        return before
    return replaced if isinstance(replaced, tuple) else (replaced,)
