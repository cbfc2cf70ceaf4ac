"""Backward through a freed graph: where this graph enters the freed one, and which fix applies."""

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ...errors import GraphFreedError
from .._engine_call import EngineCall
from .context import ErrorContext, bullet_list

_UNKNOWN = (
    "Which pass freed it is not known. If a value is carried over from an earlier step, `.detach()` it there; if two "
    "losses share a graph, add them up and call backward once."
)
_SAME_GRAPH = (
    "This whole graph was recorded before the last backward pass, which freed it. Losses that share a graph "
    "are best added and differentiated in one pass; pass retain_graph=True to the earlier call only if the passes "
    "must stay apart."
)
_CARRIED_OVER = (
    "If it was carried over from an earlier step, `.detach()` it where the new step begins: "
    "retain_graph=True would send gradients through all earlier steps, and keep them in memory. If it "
    "belongs to this step, compute all losses first, add them up, and call backward once."
)


def diagnose(text: str, call: EngineCall) -> GraphFreedError:
    """Distinguish a value carried over from an earlier step from a graph that is used twice."""
    context = ErrorContext(call.outputs)
    freed_before = call.freed_before or 0
    crossings = _crossings(context, freed_before)
    if not crossings:
        inner = [node for node in context.graph.nodes if not graph.is_leaf(node)]
        all_old = all(graph.sequence_nr(node) < freed_before for node in inner)
        return GraphFreedError(f"{text}\n{_SAME_GRAPH if all_old else _UNKNOWN}", ())
    labels = tuple(_crossing_label(context, edge, consumer) for edge, consumer in crossings)
    return GraphFreedError(
        f"{text}\nThis graph enters one that an earlier pass has freed:\n{bullet_list(labels)}\n{_CARRIED_OVER}",
        labels,
    )


def _crossings(context: ErrorContext, freed_before: int) -> list[tuple[GradientEdge, Node]]:
    """Return the edges from a node made since the last backward into the part that it freed."""
    old = {node for node in context.graph.nodes if graph.sequence_nr(node) < freed_before}
    freed: set[Node] = set()
    for node in reversed(context.graph.nodes):
        is_freed = any(entry.state == "freed" for entry in graph.saved(node))
        if node in old and (is_freed or any(used in freed for used, _ in node.next_functions)):
            freed.add(node)
    return [
        (GradientEdge(node, output_nr), consumer)
        for node in context.graph.nodes
        if node in freed
        for consumer, _, output_nr in context.graph.consumers[node]
        if consumer not in old
    ]


def _crossing_label(context: ErrorContext, edge: GradientEdge, consumer: Node) -> str:
    shape = graph.describe(edge.node)[edge.output_nr].shape
    carried = _tensor_at(edge)
    name = context.name(carried) if carried is not None else None
    value = f"`{name}`" if name else "a value"
    return f"{value} of shape {shape}, made by {context.node_label(edge.node)}, used by {context.node_label(consumer)}"


def _tensor_at(edge: GradientEdge) -> Tensor | None:
    holders = (t for t in graph.live_tensors() if t.grad_fn is edge.node and t.output_nr == edge.output_nr)
    return next(holders, None)
