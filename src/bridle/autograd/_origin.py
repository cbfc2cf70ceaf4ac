"""Where a NaN or an infinity began, looked for after a backward pass has yielded one."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from ..errors import NonFiniteGradientError
from . import _replay
from ._forward_origin import forward_origin
from ._operand import bad_places, guilty_operand


@dataclass(frozen=True, eq=False)
class Failure:
    """The pass that went wrong.

    Attributes:
        outputs: where it started.
        grads: the gradient each output started from.
        inputs: where its gradients went.
        create_graph: whether the result was to be differentiable.
        once: why the graph could run only once and is gone now; None if it is still there.
    """

    outputs: tuple[Tensor | GradientEdge, ...]
    grads: tuple[Tensor | None, ...]
    inputs: tuple[Tensor | GradientEdge, ...]
    create_graph: bool
    once: str | None


def post_mortem(failure: Failure, yielded: Sequence[Tensor | None], model: nn.Module | None) -> NonFiniteGradientError:
    """Return the error that says what was found."""
    read = graph.read(failure.outputs)
    names = graph.find_names(model)
    places = graph.places(read, names)
    offenders = _offenders(failure.inputs, yielded, names)
    lines = []
    if offenders:
        listed = ", ".join(f"{name} ({count})" for name, count in list(offenders.items())[:6])
        more = f" and {len(offenders) - 6} more" if len(offenders) > 6 else ""
        lines.append(f"NaN or infinite gradient values (how many) in {listed}{more}.")
    loss = next((o for o in failure.outputs if isinstance(o, Tensor) and not torch.isfinite(o).all()), None)
    if loss is not None:
        value = f"is {loss.item()}" if loss.numel() == 1 else "is not finite"
        found = forward_origin(read, names, places)
        lines.append(f"The loss itself {value}, before any backward. {found.text}")
        return NonFiniteGradientError(
            "\n".join(lines),
            offenders,
            node=found.node,
            module=found.module,
            operand=found.operand,
            rows=found.rows,
        )
    if failure.once is not None:
        lines.append(f"Its origin cannot be found: {failure.once}")
        return NonFiniteGradientError("\n".join(lines), offenders)
    return _backward_origin(failure, read, places, lines, offenders)


def _offenders(
    inputs: Sequence[Tensor | GradientEdge], yielded: Sequence[Tensor | None], names: graph.Names
) -> dict[str, int]:
    found = {}
    for index, (tensor, gradient) in enumerate(zip(inputs, yielded, strict=True)):
        count = 0 if gradient is None else int(bad_places(gradient).sum())
        if count:
            name = None
            if isinstance(tensor, Tensor):
                name = names.of(tensor) or graph.variable_name(tensor)
            found[name or f"input {index}"] = count
    return found


class _FoundError(Exception):
    """Ends the search."""

    def __init__(self, edge: _replay.Edge, gradient: Tensor) -> None:
        self.edge = edge
        self.gradient = gradient


def _first_bad_edge(failure: Failure, read: graph.Graph) -> tuple[_replay.Edge, Tensor] | None:
    def check(edge: _replay.Edge, gradient: Tensor) -> None:
        if bad_places(gradient).any():
            raise _FoundError(edge, gradient)

    try:
        _replay.run(read, failure.inputs, failure.grads, create_graph=failure.create_graph, visit=check)
    except _FoundError as found:
        return found.edge, found.gradient  # without its traceback, which would hold this pass
    return None


def _incoming(failure: Failure, read: graph.Graph, node: Node) -> list[Tensor | None]:
    """Return the gradients that arrive at a node, one per output of its op."""
    sums: dict[int, Tensor] = {}

    def collect(edge: _replay.Edge, gradient: Tensor) -> None:
        if edge.source is node:
            raise _FoundError(edge, gradient)
        if edge.target is node:
            earlier = sums.get(edge.output_nr)
            sums[edge.output_nr] = gradient if earlier is None else earlier + gradient

    with suppress(_FoundError):
        _replay.run(read, failure.inputs, failure.grads, create_graph=failure.create_graph, visit=collect)
    return [sums.get(number) for number in range(len(graph.describe(node)))]


def _backward_origin(
    failure: Failure,
    read: graph.Graph,
    places: dict[Node, graph.Place],
    lines: list[str],
    offenders: dict[str, int],
) -> NonFiniteGradientError:
    try:
        found = _first_bad_edge(failure, read)
    except RuntimeError as error:
        lines.append(f"Its origin could not be followed: {str(error).splitlines()[0]}")
        return NonFiniteGradientError("\n".join(lines), offenders)
    if found is None:
        lines.append(
            "No node of this pass made them. Either `.grad` was not finite before it (was it reset?), or the "
            "sum with what `.grad` held overflowed, or a hook of the parameter made them, or they came from "
            "another process, whose error names them."
        )
        return NonFiniteGradientError("\n".join(lines), offenders)
    edge, gradient = found
    node = edge.source
    if node is None:
        lines.append(f"The gradient passed in for output {edge.position} is not finite to begin with.")
        return NonFiniteGradientError("\n".join(lines), offenders)
    place = places.get(node)
    where = graph.op(node) + (f" {place}" if place is not None else "")
    module = place.module if place is not None else None
    incoming = _incoming(failure, read, node)
    blame = None
    if _any_bad(incoming):
        blame = "Each gradient that arrives there is finite, their sum is not: too large to add in this dtype."
    elif _any_bad(_replay.through_tensor_hooks(node, incoming, failure.create_graph)):
        blame = "The gradient that arrives there is finite; a hook on the tensor this op made spoils it."
    if blame is not None:
        lines.append(f"Origin: {where}. {blame}")
        return NonFiniteGradientError("\n".join(lines), offenders, node=graph.op(node), module=module)
    bad = bad_places(gradient)
    operand = guilty_operand(node, bad, [arrived for arrived in incoming if arrived is not None])
    lines.append(
        f"Origin: {where}. The gradient that came in is finite; of the one it sent to its input "
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


def _any_bad(gradients: Sequence[Tensor | None]) -> bool:
    return any(gradient is not None and bool(bad_places(gradient).any()) for gradient in gradients)
