"""Names for the nodes and tensors of a graph, shared by all diagnoses."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch.nodes import forward_source


class ErrorContext:
    """The graph of some outputs, with names for its nodes and tensors.

    Build it only after something has failed: finding names walks through all live objects.
    """

    def __init__(self, outputs: Sequence[Tensor | GradientEdge]) -> None:
        self.graph = graph.read(outputs)
        self.names = graph.find_names()

    @cached_property
    def _locations(self) -> dict[Node, graph.NodeLocation]:
        return graph.locate_nodes(self.graph, self.names)

    def name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter, buffer, or variable of the calling code."""
        return self.names.of(tensor) or graph.variable_name(tensor)

    def has_module(self, node: Node) -> bool:
        """Return whether the module that made the node is known."""
        return node in self._locations and self._locations[node].exact

    def node_label(self, node: Node) -> str:
        """Return for example "AddmmBackward0 in head"."""
        location = self._locations.get(node)
        if location is None and node not in self.graph.consumers:
            location = graph.locate_nodes(graph.read(GradientEdge(node, 0)), self.names).get(node)
        return node_label(node, location)

    def tensor_label(self, tensor: Tensor) -> str:
        """Return for example "`hidden` (shape (2, 4), made by TanhBackward0 after body)"."""
        name = self.name(tensor)
        made = f", made by {self.node_label(tensor.grad_fn)}" if tensor.grad_fn is not None else ""
        properties = f"shape {tuple(tensor.shape)}{made}"
        return f"`{name}` ({properties})" if name else f"a tensor of {properties}"


def node_label(node: Node, location: graph.NodeLocation | None) -> str:
    """Return the op with its location, for example "AddmmBackward0 in head"; in anomaly mode with its source line."""
    label = graph.op(node) if location is None else f"{graph.op(node)} {location}"
    source = forward_source(node)
    return label if source is None else f"{label} ({source})"


def argument_label(kind: str, tensor: Tensor | GradientEdge, index: int) -> str:
    """Return for example "output 0 (`loss`)", with the variable's name if the calling code has one."""
    try:
        name = graph.variable_name(tensor) if isinstance(tensor, Tensor) else None
    except Exception:  # the calling code's variables may be anything; a failed search must not hide the error
        name = None
    return f"{kind} {index} (`{name}`)" if name else f"{kind} {index}"


def producer_label(output: Tensor | GradientEdge) -> str:
    """Return for example "made by MeanBackward0 after head"."""
    try:
        if isinstance(output, Tensor) and output.grad_fn is None:
            return "not made by any recorded op"
        return f"made by {ErrorContext((output,)).node_label(graph.edge_of(output).node)}"
    except Exception:  # a failed search must not hide the error that is being reported
        return "made by an unknown op"


def bullet_list(lines: Iterable[str]) -> str:
    """Return the lines as a list, one per line."""
    return "\n".join(f"  - {line}" for line in lines)
