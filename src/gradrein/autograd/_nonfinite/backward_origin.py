"""The origin of a NaN or infinity, searched after a backward pass has produced one."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ...errors import NonFiniteGradientError
from .. import _replay
from .._diagnosis.context import node_label
from .._values import nonfinite_mask
from .forward_origin import Locations, forward_origin
from .operand import find_operand


@dataclass(frozen=True, eq=False)
class FinishedPass:
    """A backward pass that has finished.

    Attributes:
        outputs: where it started.
        grads: the gradient of each output.
        inputs: where its gradients went.
        create_graph: whether the result was to be differentiable.
        freed_because: why the graph could not be kept; None if it was.
    """

    outputs: tuple[Tensor | GradientEdge, ...]
    grads: tuple[Tensor | None, ...]
    inputs: tuple[Tensor | GradientEdge, ...]
    create_graph: bool
    freed_because: str | None


def find_origin(
    failed: FinishedPass, produced: Sequence[Tensor | None], model: nn.Module | None
) -> NonFiniteGradientError:
    """Return the error that names the origin."""
    recorded = graph.read(failed.outputs)
    names = graph.find_names(model)
    locations = graph.locate_nodes(recorded, names)
    offenders = _offenders(failed.inputs, produced, names)
    lines = []
    if offenders:
        listed = ", ".join(f"{name} ({count})" for name, count in list(offenders.items())[:6])
        more = f" and {len(offenders) - 6} more" if len(offenders) > 6 else ""
        lines.append(f"NaN or infinite gradient values (how many) in {listed}{more}.")
    loss = next((o for o in failed.outputs if isinstance(o, Tensor) and not torch.isfinite(o).all()), None)
    if loss is not None:
        value = f"is {loss.item()}" if loss.numel() == 1 else "is not finite"
        found = forward_origin(recorded, names, locations)
        lines.append(f"The loss itself {value}, before any backward. {found.text}")
        return NonFiniteGradientError(
            "\n".join(lines),
            offenders,
            node=found.node,
            module=found.module,
            operand=found.operand,
            rows=found.rows,
        )
    if failed.freed_because is not None:
        lines.append(f"Its origin cannot be found: {failed.freed_because}")
        return NonFiniteGradientError("\n".join(lines), offenders)
    return _backward_origin(failed, recorded, locations, lines, offenders)


def _offenders(
    inputs: Sequence[Tensor | GradientEdge], produced: Sequence[Tensor | None], names: graph.Names
) -> dict[str, int]:
    found = {}
    for index, (tensor, gradient) in enumerate(zip(inputs, produced, strict=True)):
        count = 0 if gradient is None else int(nonfinite_mask(gradient).sum())
        if count:
            name = None
            if isinstance(tensor, Tensor):
                name = names.of(tensor) or graph.variable_name(tensor)
            found[name or f"input {index}"] = count
    return found


class _FoundError(Exception):
    """Stop the search."""

    def __init__(self, edge: _replay.Edge, gradient: Tensor) -> None:
        self.edge = edge
        self.gradient = gradient


def _first_bad_edge(failed: FinishedPass, recorded: graph.Graph) -> tuple[_replay.Edge, Tensor] | None:
    def check(edge: _replay.Edge, gradient: Tensor) -> None:
        if nonfinite_mask(gradient).any():
            raise _FoundError(edge, gradient)

    try:
        _replay.run(recorded, failed.inputs, failed.grads, create_graph=failed.create_graph, visit=check)
    except _FoundError as found:
        return found.edge, found.gradient  # without its traceback, which would keep this pass alive
    return None


def _incoming(failed: FinishedPass, recorded: graph.Graph, node: Node) -> list[Tensor | None]:
    """Return the gradients that arrive at a node, one per output of its op."""
    sums: dict[int, Tensor] = {}

    def collect(edge: _replay.Edge, gradient: Tensor) -> None:
        if edge.source is node:
            raise _FoundError(edge, gradient)
        if edge.target is node:
            earlier = sums.get(edge.output_nr)
            sums[edge.output_nr] = gradient if earlier is None else earlier + gradient

    with suppress(_FoundError):
        _replay.run(recorded, failed.inputs, failed.grads, create_graph=failed.create_graph, visit=collect)
    return [sums.get(number) for number in range(len(graph.describe(node)))]


def _backward_origin(
    failed: FinishedPass,
    recorded: graph.Graph,
    locations: Locations,
    lines: list[str],
    offenders: dict[str, int],
) -> NonFiniteGradientError:
    try:
        found = _first_bad_edge(failed, recorded)
    except RuntimeError as error:
        lines.append(f"Its origin could not be traced: {str(error).splitlines()[0]}")
        return NonFiniteGradientError("\n".join(lines), offenders)
    if found is None:
        lines.append(
            "No node of this pass made them. Either `.grad` was not finite before (was it reset?), or the sum "
            "with the old `.grad` overflowed, or a hook of the parameter made them, or they came from another "
            "process, whose error names them."
        )
        return NonFiniteGradientError("\n".join(lines), offenders)
    edge, gradient = found
    node = edge.source
    if node is None:
        lines.append(f"The gradient passed in for output {edge.position} is not finite.")
        return NonFiniteGradientError("\n".join(lines), offenders)
    location = locations.get(node)
    where = node_label(node, location)
    module = location.module if location is not None else None
    incoming = _incoming(failed, recorded, node)
    cause = None
    if _any_nonfinite(incoming):
        cause = "Each gradient that arrives there is finite, but their sum overflows this dtype."
    elif _any_nonfinite(_replay.apply_tensor_hooks(node, incoming, failed.create_graph)):
        cause = "The gradient that arrives there is finite; a hook on the tensor this op made makes it non-finite."
    if cause is not None:
        lines.append(f"Origin: {where}. {cause}")
        return NonFiniteGradientError("\n".join(lines), offenders, node=graph.op(node), module=module)
    bad = nonfinite_mask(gradient)
    operand = find_operand(node, bad, [arrived for arrived in incoming if arrived is not None])
    lines.append(
        f"Origin: {where}. The gradient that came in is finite; of the gradient it sent to its input "
        f"{edge.position}, {int(bad.sum())} of {bad.numel()} values are not. {operand.text}"
    )
    return NonFiniteGradientError(
        "\n".join(lines),
        offenders,
        node=graph.op(node),
        module=module,
        operand=operand.name,
        rows=operand.rows,
    )


def _any_nonfinite(gradients: Sequence[Tensor | None]) -> bool:
    return any(gradient is not None and bool(nonfinite_mask(gradient).any()) for gradient in gradients)
