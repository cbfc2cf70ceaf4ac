"""Words for nodes and tensors, shared by everything that explains an error."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph


class Scene:
    """The graph of some outputs, with names for what is in it.

    Looked up only after something has failed: finding names walks through everything alive.
    """

    def __init__(self, outputs: Sequence[Tensor | GradientEdge]) -> None:
        self.read = graph.read(outputs)
        self.names = graph.find_names()

    @cached_property
    def _places(self) -> dict[Node, graph.Place]:
        return graph.places(self.read, self.names)

    def name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter, buffer, or variable of the calling code."""
        return self.names.of(tensor) or graph.variable_name(tensor)

    def is_exact(self, node: Node) -> bool:
        """Tell whether the module that made the node is known."""
        return node in self._places and self._places[node].exact

    def tell(self, node: Node) -> str:
        """Return for example "AddmmBackward0 in head"."""
        place = self._places.get(node)
        if place is None and node not in self.read.consumers:
            place = graph.places(graph.read(GradientEdge(node, 0)), self.names).get(node)
        return graph.op(node) + (f" {place}" if place else "")

    def describe(self, tensor: Tensor) -> str:
        """Return for example "`hidden` (shape (2, 4), made by TanhBackward0 after body)"."""
        name = self.name(tensor)
        made = f", made by {self.tell(tensor.grad_fn)}" if tensor.grad_fn is not None else ""
        facts = f"shape {tuple(tensor.shape)}{made}"
        return f"`{name}` ({facts})" if name else f"a tensor of {facts}"


def label(kind: str, tensor: Tensor | GradientEdge, index: int) -> str:
    """Return for example "output 0 (`loss`)", with the variable's name if the calling code has one."""
    try:
        name = graph.variable_name(tensor) if isinstance(tensor, Tensor) else None
    except Exception:  # the calling code's variables may be anything; a missing name hides no error
        name = None
    return f"{kind} {index} (`{name}`)" if name else f"{kind} {index}"


def origin(output: Tensor | GradientEdge) -> str:
    """Return for example "made by MeanBackward0 after head"."""
    try:
        if isinstance(output, Tensor) and output.grad_fn is None:
            return "not made by any recorded op"
        return f"made by {Scene((output,)).tell(graph.edge_of(output).node)}"
    except Exception:  # whatever is met while looking must not replace the error that is being told
        return "made by an op that cannot be told"


def indent(lines: Iterable[str]) -> str:
    """Return the lines as a list, one per line."""
    return "\n".join(f"  - {line}" for line in lines)
