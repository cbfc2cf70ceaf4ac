"""Unused inputs: every one of them by name, each with its reason."""

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from ..errors import UnusedInputError
from ._run import Run
from ._words import Scene, indent

_FROZEN = "it does not require grad"
_NOWHERE = "no recorded graph uses it: it was never used, or all that was computed from it is gone"


def explain(text: str, run: Run) -> UnusedInputError:
    """Name every input that gets no gradient, and say why."""
    scene = Scene(run.outputs)
    elsewhere = _Elsewhere(scene)
    reasons: dict[str, str] = {}
    for index, value in enumerate(run.inputs.values):
        reason = _reason(value, scene, elsewhere)
        if reason is not None:
            reasons[_name(run, index, scene)] = reason
    lines = [f"{name}: {reason}" for name, reason in reasons.items()]
    if _NOWHERE in reasons.values():
        lines += _ends(scene)
    if _FROZEN in reasons.values():
        advice = "Leave out what does not require grad (allow_unused does not cover it)."
    else:
        advice = "Pass allow_unused=True to get None for these, or materialize_grads=True to get zeros."
    return UnusedInputError(f"{text}\n{indent(lines)}\n{advice}", tuple(reasons))


def _name(run: Run, index: int, scene: Scene) -> str:
    if run.inputs.names is not None:
        return run.inputs.names[index]
    value = run.inputs.values[index]
    known = scene.name(value) if isinstance(value, Tensor) else None
    return f"input {index}" if known is None else f"input {index} (`{known}`)"


def _reason(value: Tensor | GradientEdge, scene: Scene, elsewhere: "_Elsewhere") -> str | None:
    if isinstance(value, Tensor) and not value.requires_grad:
        return _FROZEN
    edge = graph.edge_of(value)
    if edge.node not in scene.read.consumers:
        return elsewhere.reason(edge.node)
    if any(root.node is edge.node and root.output_nr == edge.output_nr for root in scene.read.roots):
        return None
    users = [c.node for c in scene.read.consumers[edge.node] if c.output_nr == edge.output_nr]
    if not users:
        return "another result of the same op is used, this one is not"
    if all(graph.is_custom(node) for node in users):
        return f"used, but the backward of {scene.tell(users[0])} returned None for it"
    return None


class _Elsewhere:
    """The graphs of everything alive that is no part of the outputs."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.tensors = [t for t in graph.live_tensors() if t.grad_fn is not None]
        self.read = graph.read(self.tensors)

    def reason(self, unused: Node) -> str:
        """Say what became of a tensor that the outputs do not depend on."""
        if unused not in self.read.consumers:
            return _NOWHERE
        above = self._above(unused)
        reached = [tensor for tensor in self.tensors if tensor.grad_fn in above]
        cut = self._cut(reached)
        if cut is not None:
            return cut
        order = {node: index for index, node in enumerate(self.read.nodes)}
        last = min(reached, key=lambda tensor: order[graph.edge_of(tensor).node], default=None)
        if last is None:
            return "used, but cut off from this output"
        return f"used for {self.scene.describe(last)}, which is no part of this output"

    def _above(self, start: Node) -> set[Node]:
        seen, stack = {start}, [start]
        while stack:
            for consumer in self.read.consumers[stack.pop()]:
                if consumer.node not in seen:
                    seen.add(consumer.node)
                    stack.append(consumer.node)
        return seen

    def _cut(self, reached: Iterable[Tensor]) -> str | None:
        """Find a value that entered the outputs' graph without its own: same memory, no history."""
        by_memory = {memory: tensor for tensor in reached if (memory := graph.memory_of(tensor)) is not None}
        for node in self.scene.read.nodes:
            for entry in graph.saved(node):
                if not isinstance(entry.value, Tensor) or entry.value.requires_grad:
                    continue
                source = by_memory.get(graph.memory_of(entry.value) or -1)
                if source is not None:
                    told = f"{self.scene.describe(source)} depends on it, but enters {self.scene.tell(node)}"
                    return f"{told} (as `{entry.name}`) detached"
        return None


def _ends(scene: Scene) -> list[str]:
    """Say where values without gradient enter the outputs' graph: a detach in the forward shows there."""
    ends = [
        scene.tell(node)
        for node in scene.read.nodes
        if scene.is_exact(node) and any(used is None for used, _ in node.next_functions)
    ]
    if not ends:
        return []
    return ["the output's graph takes in a value without gradient at " + ", ".join(ends[-3:])]
