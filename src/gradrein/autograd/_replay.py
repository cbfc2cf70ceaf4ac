"""`replay`: a backward pass in Python over the nodes torch recorded, with a visitor."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch.checkpoint import is_reentrant, recompute_once
from .._torch.engine import run_engine, validate_grad
from .._torch.hooks import node_hooks
from .._torch.nodes import is_ddp_sink, is_distributed, output_metadata
from ..errors import BackwardError
from ._arguments import Gradients, as_outputs, gradients_for
from ._engine_call import Output


class Edge(NamedTuple):
    """An edge along which a gradient flows from one node to another.

    Attributes:
        source: the node that computed the gradient; None where the pass starts.
        position: which of the source's inputs it belongs to, as an index into ``source.next_functions``;
            where the pass starts, the index of the output.
        target: the node that receives the gradient.
        output_nr: which output of the target's op it belongs to.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> edges = []
        >>> _ = gradrein.autograd.replay((w * 3).sum(), w, visit=lambda edge, gradient: edges.append(edge))
        >>> [gradrein.graph.op(edge.target) for edge in edges]
        ['SumBackward0', 'MulBackward0', 'AccumulateGrad']

    See Also:
        [`gradrein.autograd.replay`][]
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
    """Differentiate like `torch.autograd.grad`, one node at a time in Python, and visit every gradient.

    The result is bitwise equal to that of torch's engine, unless `visit` changes a gradient. The graph is kept,
    ``.grad`` does not change, hooks on tensors and nodes run, and nothing is averaged over processes. One
    difference: the nodes do not run inside one engine call, so a hook that waits for several tensors
    (`torch.autograd.graph.register_multi_grad_hook`) does not fire.

    Args:
        outputs: one or several tensors or edges to differentiate.
        inputs: one or several tensors or edges to differentiate with respect to.
        grad_outputs: the gradient of each output; None means 1 and is allowed only for a real scalar.
        create_graph: make the result differentiable.
        visit: called as ``visit(edge, gradient)`` for the gradient of every edge, before the gradients that
            arrive at a node are added. It may return a replacement of the same shape and dtype.

    Returns:
        One gradient per input; None for an input that the outputs do not depend on.

    Raises:
        BackwardError: the graph contains something that cannot be replayed correctly, such as a reentrant checkpoint
            or a sharded model; an output or input has no graph; a gradient is missing or does not match its output.

    Examples:
        The gradient without the contribution of the exponential:

        >>> import torch, gradrein
        >>> from gradrein import graph
        >>> x = torch.tensor(0.5, requires_grad=True)
        >>> y = x.exp() + 3 * x
        >>> def cut(edge, gradient):
        ...     if edge.source is not None and graph.op(edge.source) == "ExpBackward0":
        ...         return torch.zeros_like(gradient)
        >>> gradrein.autograd.replay(y, x, visit=cut)
        (tensor(3.),)

    See Also:
        [`gradrein.trace`][], [`gradrein.autograd.Edge`][]
    """
    starts, wanted = as_outputs(outputs), as_outputs(inputs)
    for kind, tensors in (("output", starts), ("input", wanted)):
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                raise BackwardError(f"{kind} {index} does not require grad, so no graph was recorded for it.")
    recorded = graph.read(starts)
    _refuse_unreplayable(recorded)
    grads = gradients_for(starts, grad_outputs, batched=False)
    return run(recorded, wanted, grads, create_graph=create_graph, visit=visit)


def run(
    recorded: graph.Graph,
    inputs: tuple[Output, ...],
    grads: tuple[Tensor | None, ...],
    *,
    create_graph: bool = False,
    visit: Visitor | None = None,
) -> tuple[Tensor | None, ...]:
    """Run every node of the graph that leads to an input, each when all its gradients have arrived."""
    wanted = [graph.edge_of(tensor) for tensor in inputs]
    targets = {edge.node for edge in wanted}
    leading = recorded.leading_to(targets)
    state = _PassState({node: index for index, node in enumerate(recorded.nodes)}, create_graph, visit)
    gradients: dict[tuple[Node, int], Tensor | None] = {}
    with recompute_once(), torch.set_grad_enabled(create_graph):
        for index, (root, gradient) in enumerate(zip(recorded.roots, grads, strict=True)):
            state.send(Edge(None, index, root.node, root.output_nr), gradient)
        for node in recorded.nodes:  # in this order every node has its gradients before it runs
            incoming = state.collect(node)
            if node in targets:
                # As in torch: an input that the pass goes through is captured before the hooks of its tensor.
                captured = incoming if node in leading else apply_tensor_hooks(node, incoming, create_graph)
                gradients |= {(node, number): grad for number, grad in enumerate(captured)}
            if node in leading:
                for position, outgoing in enumerate(state.execute(node, incoming)):
                    target, output_nr = node.next_functions[position]
                    if target is not None and (target in leading or target in targets):
                        state.send(Edge(node, position, target, output_nr), outgoing)
    return tuple(gradients.get((edge.node, edge.output_nr)) for edge in wanted)


def _refuse_unreplayable(recorded: graph.Graph) -> None:
    """Raise for a graph whose gradients are completed by code that runs only inside torch's engine."""
    for node in recorded.nodes:
        if graph.is_custom(node):
            _refuse_node(node)


def _refuse_node(node: Node) -> None:
    if is_reentrant(node):
        raise BackwardError(
            "the graph contains a reentrant checkpoint (CheckpointFunctionBackward), which writes the gradients "
            "of its parameters from inside and cannot return them. Use checkpoint(..., use_reentrant=False)."
        )
    if is_distributed(node) or is_ddp_sink(node):
        raise BackwardError(
            f"the graph contains {graph.op(node)}, which communicates between processes as part of torch's "
            "engine. Use gradrein.trace to observe such a pass."
        )


@dataclass
class _PassState:
    """The gradients that have been sent and not yet used."""

    order: dict[Node, int]
    create_graph: bool
    visit: Visitor | None
    arrived: dict[Node, list[Tensor | None]] = field(default_factory=dict)

    def send(self, edge: Edge, gradient: Tensor | None) -> None:
        """Send a gradient to its target, and add it to what has already arrived."""
        if gradient is None:
            return
        gradient = validate_grad(gradient, edge.target, edge.output_nr)
        if self.visit is not None:
            gradient = _visited(self.visit, edge, gradient)
        slots = self.arrived.setdefault(edge.target, [None] * len(output_metadata(edge.target)))
        earlier = slots[edge.output_nr]
        if earlier is None:
            slots[edge.output_nr] = gradient
        else:  # a sparse gradient can be added to a dense one, not the other way round
            sparse = earlier.layout != torch.strided
            slots[edge.output_nr] = gradient + earlier if sparse else earlier + gradient

    def collect(self, node: Node) -> list[Tensor | None]:
        """Return the gradients that arrived at a node, None for an output without one."""
        return self.arrived.pop(node, None) or [None] * len(output_metadata(node))

    def execute(self, node: Node, incoming: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run one node, with its hooks, and return one gradient per input of its op."""
        if graph.is_custom(node):
            return self._execute_custom(node, incoming)
        gradients = tuple(apply_tensor_hooks(node, incoming, self.create_graph))
        for before in node_hooks(node.register_prehook):
            gradients = _or_unchanged(before(gradients), gradients)
        result = node(*gradients)  # type: ignore[operator]
        outgoing: tuple[Tensor | None, ...] = result if isinstance(result, tuple) else (result,)
        after_hooks = node_hooks(node.register_hook)
        if after_hooks:
            outgoing = tuple(
                gradient if gradient is None or used is None else validate_grad(gradient, used, output_nr)
                for gradient, (used, output_nr) in zip(outgoing, node.next_functions, strict=True)
            )
        for after in after_hooks:
            outgoing = _or_unchanged(after(outgoing, gradients), outgoing)
        return outgoing

    def _execute_custom(self, node: Node, incoming: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run one node of a Python Function on torch's engine, alone.

        Only the engine knows whether the Function expects zeros or None for a missing gradient.
        """
        outgoing: list[tuple[Tensor | None, ...]] = []
        starts = {number: gradient for number, gradient in enumerate(incoming) if gradient is not None}
        handles = [node.register_hook(lambda grad_inputs, _: outgoing.append(grad_inputs))]
        if not starts:  # the engine needs a gradient to start from: pass zeros, and remove them at the node
            shape, dtype, device = graph.describe(node)[0]
            starts = {0: torch.zeros(shape, dtype=dtype, device=device)}
            handles.append(node.register_prehook(lambda grads: (None,) * len(grads)))
        used = [(child, number) for child, number in node.next_functions if child is not None]
        # The engine stops at the first child in order: no path leads there through another child, so only
        # this node runs.
        child, number = min(used, key=lambda edge: self.order[edge[0]])
        try:
            edges = [GradientEdge(node, number) for number in starts]
            _engine(edges, list(starts.values()), [GradientEdge(child, number)], self.create_graph)
        finally:
            for handle in handles:
                handle.remove()
        return outgoing[0]


def _visited(visit: Visitor, edge: Edge, gradient: Tensor) -> Tensor:
    replacement = visit(edge, gradient)
    if replacement is None:
        return gradient
    if replacement.shape != gradient.shape or replacement.dtype != gradient.dtype:
        raise BackwardError(
            f"visit returned a gradient of shape {tuple(replacement.shape)} and {replacement.dtype} for an edge "
            f"into {graph.op(edge.target)} that carries shape {tuple(gradient.shape)} and {gradient.dtype}."
        )
    return replacement


def _engine(
    starts: list[GradientEdge], grads: list[Tensor], ends: list[GradientEdge], create_graph: bool
) -> tuple[Tensor | None, ...]:
    return run_engine(starts, grads, True, create_graph, ends, allow_unreachable=True, accumulate=False)


def apply_tensor_hooks(node: Node, incoming: list[Tensor | None], create_graph: bool) -> list[Tensor | None]:
    """Apply the hooks of the tensors this node made to their gradients.

    An engine call that ends where it starts does only that.
    """
    present = {number: gradient for number, gradient in enumerate(incoming) if gradient is not None}
    if not present:
        return incoming
    edges = [GradientEdge(node, number) for number in present]
    hooked = dict(zip(present, _engine(edges, list(present.values()), edges, create_graph), strict=True))
    return [hooked.get(number) for number in range(len(incoming))]


def _or_unchanged(
    replacement: tuple[Tensor | None, ...] | Tensor | None, unchanged: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return what a hook returned, or what it was given if it returned None."""
    if replacement is None:
        return unchanged
    return replacement if isinstance(replacement, tuple) else (replacement,)
