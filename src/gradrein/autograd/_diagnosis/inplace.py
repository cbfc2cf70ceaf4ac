"""Saved values that were changed in place: all of them, each with its likely writer."""

from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ...errors import InplaceModifiedError
from .._engine_call import EngineCall
from .context import ErrorContext, bullet_list


def diagnose(text: str, call: EngineCall) -> InplaceModifiedError:
    """List every stale saved tensor with its op, module and versions, and the likely writer."""
    context = ErrorContext(call.outputs)
    stale = tuple(
        _stale_label(context, node, entry)
        for node in context.graph.nodes
        for entry in graph.saved(node)
        if entry.state == "stale"
    )
    if not stale:  # in a graph inside a node, such as a checkpoint's
        return InplaceModifiedError(text, ())
    return InplaceModifiedError(
        f"{text}\nSaved for this backward pass and changed since:\n{bullet_list(stale)}\n"
        "Use the op without the underscore, or `.clone()` the tensor before the change.",
        stale,
    )


def _stale_label(context: ErrorContext, node: Node, entry: graph.SavedValue) -> str:
    held = entry.held
    expected, current = entry.versions or (None, None)
    name = context.name(graph.base_of(held)) if held is not None else None
    subject = f"`{entry.name}` of {context.node_label(node)}" + (f", which is `{name}`" if name else "")
    shape = f", shape {tuple(held.shape)}" if held is not None else ""
    return f"{subject}{shape}: saved at version {expected}, now at {current}; {_writer(context, node, held)}"


def _writer(context: ErrorContext, node: Node, held: Tensor | None) -> str:
    if held is None:
        return "the writer is not known"
    base = graph.base_of(held)
    if base.is_leaf and base.requires_grad:
        return "most likely written by an optimizer step between forward and backward"
    memory = graph.memory_of(held)
    same = [held, *(t for t in graph.live_tensors() if memory is not None and graph.memory_of(t) == memory)]
    for tensor in same:
        writer = _producer(tensor)
        if writer is not None and writer is not node and graph.sequence_nr(writer) > graph.sequence_nr(node):
            return f"most likely written by {context.node_label(writer)}"
    return "most likely written under no_grad, or by an op that autograd does not record"


def _producer(tensor: Tensor) -> Node | None:
    """Return the node that made a tensor; torch refuses for some views."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
