"""The origin of a NaN or infinity, searched after a backward pass has produced one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ...errors import NonFiniteGradientError
from .. import _replay
from .._diagnosis.context import node_label
from .._engine_call import EngineCall
from .._values import nonfinite_mask
from .forward_origin import Locations, forward_origin
from .operand import Origin, find_operand


def find_origin(
    failed: EngineCall, produced: Sequence[Tensor | None], model: nn.Module | None, freed_because: str | None
) -> NonFiniteGradientError:
    """Return the error that names the origin.

    Args:
        failed: the pass that has finished.
        produced: the gradients of its inputs.
        model: the model whose names to use.
        freed_because: why its graph could not be kept; None if it was.
    """
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
        origin = forward_origin(recorded, names, locations)
        origin = origin._replace(text=f"The loss itself {value}, before any backward. {origin.text}")
    elif freed_because is not None:
        origin = Origin(f"Its origin cannot be found: {freed_because}")
    else:
        origin = _backward_origin(failed, recorded, locations)
    text, node, module, operand, rows = origin
    message = "\n".join([*lines, text])
    return NonFiniteGradientError(message, offenders, node=node, module=module, operand=operand, rows=rows)


def _offenders(
    inputs: Sequence[Tensor | GradientEdge], produced: Sequence[Tensor | None], names: graph.Names
) -> dict[str, int]:
    counts = {}
    for index, (tensor, gradient) in enumerate(zip(inputs, produced, strict=True)):
        count = 0 if gradient is None else int(nonfinite_mask(gradient).sum())
        if count:
            name = None
            if isinstance(tensor, Tensor):
                name = names.of(tensor) or graph.variable_name(tensor)
            counts[name or f"input {index}"] = count
    return counts


def _first_bad_edge(failed: EngineCall, recorded: graph.Graph) -> tuple[_replay.Edge, Tensor] | None:
    bad: list[tuple[_replay.Edge, Tensor]] = []

    def check(edge: _replay.Edge, gradient: Tensor) -> None:
        if not bad and nonfinite_mask(gradient).any():
            bad.append((edge, gradient))

    _replay.run(recorded, failed.inputs, failed.grads, create_graph=failed.create_graph, visit=check)
    return bad[0] if bad else None


def _incoming(failed: EngineCall, recorded: graph.Graph, node: Node) -> list[Tensor | None]:
    """Return the gradients that arrive at a node, one per output of its op."""
    sums: dict[int, Tensor] = {}

    def collect(edge: _replay.Edge, gradient: Tensor) -> None:
        if edge.target is node:
            earlier = sums.get(edge.output_nr)
            sums[edge.output_nr] = gradient if earlier is None else earlier + gradient

    _replay.run(recorded, failed.inputs, failed.grads, create_graph=failed.create_graph, visit=collect)
    return [sums.get(number) for number in range(len(graph.describe(node)))]


def _backward_origin(failed: EngineCall, recorded: graph.Graph, locations: Locations) -> Origin:
    try:
        bad_edge = _first_bad_edge(failed, recorded)
    except RuntimeError as error:
        return Origin(f"Its origin could not be traced: {str(error).splitlines()[0]}")
    if bad_edge is None:
        return Origin(
            "No node of this pass made them. Either `.grad` was not finite before (was it reset?), or the sum "
            "with the old `.grad` overflowed, or a hook of the parameter made them, or they came from another "
            "process, whose error names them."
        )
    edge, gradient = bad_edge
    node = edge.source
    if node is None:
        return Origin(f"The gradient passed in for output {edge.position} is not finite.")
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
        return Origin(f"Origin: {where}. {cause}", graph.op(node), module)
    bad = nonfinite_mask(gradient)
    origin = find_operand(node, bad, [arrived for arrived in incoming if arrived is not None])
    text = (
        f"Origin: {where}. The gradient that came in is finite; of the gradient it sent to its input "
        f"{edge.position}, {int(bad.sum())} of {bad.numel()} values are not. {origin.text}"
    )
    return origin._replace(text=text, node=graph.op(node), module=module)


def _any_nonfinite(gradients: Sequence[Tensor | None]) -> bool:
    return any(gradient is not None and bool(nonfinite_mask(gradient).any()) for gradient in gradients)
