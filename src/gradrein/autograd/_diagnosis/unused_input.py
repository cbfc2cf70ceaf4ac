"""Unused inputs: each by name and with its reason."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ...errors import UnusedInputError
from .._engine_call import EngineCall
from .context import ErrorContext, bullet_list

_NOT_REACHED = "the outputs do not depend on it"
_FROZEN = "it does not require grad"
_NO_USE = "no recorded graph uses it: it was never used, or all that was computed from it is deleted"


def diagnose(text: str, call: EngineCall) -> UnusedInputError:
    """Name every input that gets no gradient, with the reason."""
    context = ErrorContext(call.outputs)
    tensors = [t for t in graph.live_tensors() if t.grad_fn is not None]
    others = graph.read(tensors)
    reasons: dict[str, str] = {}
    for index, value in enumerate(call.inputs):
        reason = _reason(value, context)
        if reason is _NOT_REACHED:
            reason = _why_not_reached(graph.edge_of(value).node, context, tensors, others)
        if reason is not None:
            reasons[_name(call, index, context)] = reason
    lines = [f"{name}: {reason}" for name, reason in reasons.items()]
    if _NO_USE in reasons.values():
        lines += _detached_entries(context)
    if _FROZEN in reasons.values():
        advice = "Leave out what does not require grad (allow_unused does not cover it)."
    else:
        advice = "Pass allow_unused=True to get None for these, or materialize_grads=True to get zeros."
    return UnusedInputError(f"{text}\n{bullet_list(lines)}\n{advice}", tuple(reasons))


def _name(call: EngineCall, index: int, context: ErrorContext) -> str:
    if call.names is not None:
        return call.names[index]
    value = call.inputs[index]
    known = context.name(value) if isinstance(value, Tensor) else None
    return f"input {index}" if known is None else f"input {index} (`{known}`)"


def _reason(value: Tensor | GradientEdge, context: ErrorContext) -> str | None:
    if isinstance(value, Tensor) and not value.requires_grad:
        return _FROZEN
    edge = graph.edge_of(value)
    if edge.node not in context.graph.consumers:
        return _NOT_REACHED
    if any(root.node is edge.node and root.output_nr == edge.output_nr for root in context.graph.roots):
        return None
    users = [op for op, _, output_nr in context.graph.consumers[edge.node] if output_nr == edge.output_nr]
    if not users:
        return "another result of the same op is used, this one is not"
    if all(graph.is_custom(node) for node in users):
        return f"used, but the backward of {context.node_label(users[0])} returned None for it"
    return None


def _why_not_reached(unused: Node, context: ErrorContext, tensors: Sequence[Tensor], others: graph.Graph) -> str:
    """Return why the outputs do not depend on a tensor, by the graphs of all live tensors."""
    if unused not in others.consumers:
        return _NO_USE
    above = {unused, *others.leading_to({unused})}
    reached = [tensor for tensor in tensors if tensor.grad_fn in above]
    detached = _detached_use(reached, context)
    if detached is not None:
        return detached
    order = {node: index for index, node in enumerate(others.nodes)}
    last = min(reached, key=lambda tensor: order[graph.edge_of(tensor).node], default=None)
    if last is None:
        return "used, but not connected to this output"
    return f"used for {context.tensor_label(last)}, which is not part of this output"


def _detached_use(reached: Iterable[Tensor], context: ErrorContext) -> str | None:
    """Find a value that entered the outputs' graph detached: same memory, no history."""
    by_memory = {memory: tensor for tensor in reached if (memory := graph.memory_of(tensor)) is not None}
    for node in context.graph.nodes:
        for entry in graph.saved(node):
            if not isinstance(entry.value, Tensor) or entry.value.requires_grad:
                continue
            source = by_memory.get(graph.memory_of(entry.value) or -1)
            if source is not None:
                text = f"{context.tensor_label(source)} depends on it, but enters {context.node_label(node)}"
                return f"{text} (as `{entry.name}`) detached"
    return None


def _detached_entries(context: ErrorContext) -> list[str]:
    """Return where values without gradient enter the outputs' graph: a detach in the forward shows there."""
    entries = [
        context.node_label(node)
        for node in context.graph.nodes
        if context.has_module(node) and any(used is None for used, _ in node.next_functions)
    ]
    if not entries:
        return []
    return ["a value without gradient enters the output's graph at " + ", ".join(entries[-3:])]
