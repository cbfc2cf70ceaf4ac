"""Saved values that were changed in place: all of them, and who did it as far as can be seen."""

from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from ..errors import InplaceModifiedError
from ._run import Run
from ._words import Scene, indent


def explain(text: str, run: Run) -> InplaceModifiedError:
    """List every stale saved tensor with its op, module and versions, and the likely writer."""
    scene = Scene(run.outputs)
    stale = tuple(
        _tell(scene, node, entry)
        for node in scene.read.nodes
        for entry in graph.saved(node)
        if entry.state is graph.State.STALE
    )
    if not stale:
        hidden = "The changed tensor is in a graph inside one of the nodes, such as a reentrant checkpoint."
        return InplaceModifiedError(f"{text}\n{hidden}", ())
    return InplaceModifiedError(
        f"{text}\nSaved for this backward pass and changed since:\n{indent(stale)}\n"
        "Use the op without the underscore, or `.clone()` the tensor before the change.",
        stale,
    )


def _tell(scene: Scene, node: Node, entry: graph.Saved) -> str:
    held = entry.held
    expected, found = entry.versions or (None, None)
    name = scene.name(graph.base_of(held)) if held is not None else None
    subject = f"`{entry.name}` of {scene.tell(node)}" + (f", which is `{name}`" if name else "")
    shape = f", shape {tuple(held.shape)}" if held is not None else ""
    return f"{subject}{shape}: saved at version {expected}, now at {found}; {_writer(scene, node, held)}"


def _writer(scene: Scene, node: Node, held: Tensor | None) -> str:
    if held is None:
        return "the writer is not known"
    base = graph.base_of(held)
    if base.is_leaf and base.requires_grad:
        return "most likely written by an optimizer step between forward and backward"
    memory = graph.memory_of(held)
    same = [held, *(t for t in graph.live_tensors() if memory is not None and graph.memory_of(t) == memory)]
    for tensor in same:
        writer = _maker(tensor)
        if writer is not None and writer is not node and graph.sequence_nr(writer) > graph.sequence_nr(node):
            return f"most likely written by {scene.tell(writer)}"
    return "most likely written under no_grad, or by an op that autograd does not follow"


def _maker(tensor: Tensor) -> Node | None:
    """The node that made a tensor; torch refuses to say for some views, and any tensor alive is asked."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
