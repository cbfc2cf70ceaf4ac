"""What is differentiated: one loss per sample, and runs of the engine over their graph."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..._torch.signature import Scan, scan
from . import runs

# Is shown an op and the gradients at its outputs.
Gradients: TypeAlias = tuple[Tensor | None, ...]
See: TypeAlias = Callable[[Node, Gradients], None]


@dataclass(frozen=True, eq=False)
class Losses:
    """What is differentiated.

    Attributes:
        root: one loss per entry.
        sample_of: which sample each entry counts for.
        samples: how many samples there are.
    """

    root: Tensor
    sample_of: Tensor
    samples: int

    @cached_property
    def scan(self) -> Scan:
        """The graph recorded behind the losses, in one pass: enough to recognise it."""
        root = self.root
        return scan(graph.edge_of(root).node if root.requires_grad and root.is_leaf else root.grad_fn)

    @cached_property
    def read(self) -> graph.Graph:
        """The same with the uses of each output."""
        return graph.read(self.root)

    def visit(self, nodes: Iterable[Node], weights: Tensor, see: See) -> None:
        """Show the gradients at the outputs of these ops, the loss of each sample times its weight."""
        passed, ends = self.passed_and_ends(nodes)
        each = weights.to(self.root)[self.sample_of]
        runs.visit(self.root, each, passed, ends, see, retain_graph=True)

    def passed_and_ends(self, nodes: Iterable[Node]) -> tuple[list[Node], list[Node]]:
        """Return those ops through which the gradient goes to reach others of them, and the rest."""
        wanted = dict.fromkeys(nodes)
        above = self.read.leading_to(wanted)
        return [n for n in wanted if n in above], [n for n in wanted if n not in above]
