"""Records of nodes and modules: numbers and names only, so that no tensor is kept alive."""

from dataclasses import dataclass

import torch

from .grad_stats import GradStats


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of the graph in one backward pass.

    Attributes:
        index: its position in the order of the pass.
        op: torch's name for it.
        module: path of the module it belongs to, '' for the model itself, None if unknown.
        exact: True if it was created in that module; False if that is the last known module before it.
        parameter: name of the leaf whose gradient it accumulates, for an `AccumulateGrad` node.
        shape: shape of the op's (first) output, which is the shape of the incoming gradient.
        dtype: its dtype.
        incoming: the incoming gradient, after hooks; None if there was none or it was not measured.
        outgoing: the gradients it sent, combined.
        seconds: wall-clock time of the node. On an accelerator this is the time to launch the
            work. The recomputation of a checkpoint is attributed to the first node that needs it.
        targets: index of each node it sends gradients to.
        sent: the gradient sent to each of them.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> first = gradrein.trace((w * 3).sum()).nodes[0]
        >>> first.op, first.incoming.norm, first.shape
        ('SumBackward0', 1.0, ())

    See Also:
        [`gradrein.autograd.Trace`][], [`gradrein.autograd.GradStats`][]
    """

    index: int
    op: str
    module: str | None
    exact: bool
    parameter: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    incoming: GradStats | None
    outgoing: GradStats | None
    seconds: float
    targets: tuple[int, ...]
    sent: tuple[GradStats | None, ...]


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """The nodes of one module, combined.

    Attributes:
        module: its path, '' for the model itself, None for nodes whose module is unknown.
        nodes: the number of its nodes.
        seconds: total time of its nodes.
        entering: the gradients that its nodes received from other modules, combined.
        leaving: the gradients that its nodes sent to other modules.
        parameters: the gradients of its own parameters.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> trace = gradrein.trace(model(torch.ones(3, 2)).sum(), model)
        >>> [summary.module for summary in trace.by_module()]
        ['0']

    See Also:
        [`gradrein.autograd.Trace`][], [`gradrein.autograd.GradStats`][]
    """

    module: str | None
    nodes: int
    seconds: float
    entering: GradStats | None
    leaving: GradStats | None
    parameters: GradStats | None


def module_name(module: str | None) -> str:
    """Return a module's path for display."""
    return {"": "(model)", None: "?"}.get(module, str(module))


def short(norm: float) -> str:
    """Return a norm with three digits."""
    return f"{norm:.3g}"
