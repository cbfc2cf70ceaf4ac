"""`trace`: an ordinary backward pass on torch's engine, recorded by hooks on its nodes."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ... import graph
from ...errors import ArgumentTypeError
from .._arguments import check_has_graph, check_is_loss, check_model, gradients_for
from .grad_stats import GradStats, Meter, combine
from .records import NodeRecord
from .result import Trace


def trace(
    loss: Tensor,
    model: nn.Module | None = None,
    *,
    gradient: Tensor | None = None,
    retain_graph: bool = False,
    modules: Callable[[Node], str | None] | None = None,
) -> Trace:
    """Run ``loss.backward()`` and record what every node did.

    The pass is torch's own: same ``.grad``, hooks and communication, and the graph is freed as usual. The result
    holds only numbers and names; it keeps neither gradients nor the graph alive.

    Args:
        loss: the tensor to differentiate.
        model: the model whose parameter names to use. Without it, the live modules of the process are searched,
            which takes some milliseconds.
        gradient: the gradient of `loss`, if it is not a scalar.
        retain_graph: keep the graph for another pass.
        modules: what `graph.record_modules` yielded for the forward pass. With it, the module of every node is
            known; without it, a node that uses no parameter is assigned to the last known module before it.

    Returns:
        The trace. Print it for a table by module.

    Raises:
        ArgumentError: (a ValueError and TypeError) `loss` is not a tensor, or `model` is not a module.
        BackwardError: (a RuntimeError) `loss` has no graph, or is not a scalar and no `gradient` was passed.

    Examples:
        >>> import torch, gradrein
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with torch.no_grad():
        ...     _ = model[0].weight.fill_(1.0), model[0].bias.zero_()
        >>> trace = gradrein.trace(model(torch.tensor([[1.0, -3.0]])).sum(), model)
        >>> for node in trace.nodes:
        ...     print(node.op, node.outgoing and f"{node.outgoing.zeros} of {node.outgoing.size} are zero")
        SumBackward0 0 of 2 are zero
        ReluBackward0 2 of 2 are zero
        AddmmBackward0 6 of 6 are zero
        AccumulateGrad None
        TBackward0 4 of 4 are zero
        AccumulateGrad None

    See Also:
        [`gradrein.autograd.Trace`][], [`gradrein.detect_nonfinite`][], [`gradrein.autograd.replay`][],
        [`gradrein.graph.record_modules`][]
    """
    check_is_loss(loss, "trace")
    check_has_graph(loss, "trace")
    if model is not None:
        check_model(model, "trace")
    if modules is not None and not callable(modules):
        raise ArgumentTypeError(
            f"trace: `modules` is what graph.record_modules() yields, found {type(modules).__name__}."
        )
    gradients_for((loss,), gradient, batched=False)
    recorded = graph.read(loss)
    names = graph.find_names(model)
    count, meter = len(recorded.nodes), Meter()
    node_seconds = [0.0] * count
    incoming: list[GradStats | None] = [None] * count
    outgoing: list[tuple[GradStats | None, ...]] = [()] * count
    handles = [
        handle
        for index, node in enumerate(recorded.nodes)
        for handle in _measure_by_hooks(index, node, meter, node_seconds, incoming, outgoing)
    ]
    started = perf_counter()
    try:
        torch.autograd.backward(loss, gradient, retain_graph=retain_graph)
    finally:
        seconds = perf_counter() - started
        for handle in handles:
            handle.remove()
    locations = graph.locate_nodes(recorded, names, modules)
    numbers = list(zip(node_seconds, incoming, outgoing, strict=True))
    return Trace(_records(recorded, names, locations, numbers), seconds)


def _measure_by_hooks(
    index: int,
    node: Node,
    meter: Meter,
    seconds: list[float],
    incoming: list[GradStats | None],
    outgoing: list[tuple[GradStats | None, ...]],
) -> list[Any]:
    """Register hooks that write what a node does at its index. They hold no node: that would be a reference cycle."""
    started = 0.0

    def before(_: Sequence[Tensor | None]) -> None:
        nonlocal started
        started = perf_counter()

    def after(grads_out: Sequence[Tensor | None], grads_in: Sequence[Tensor | None]) -> None:
        seconds[index] = perf_counter() - started
        incoming[index] = combine([meter(gradient) for gradient in grads_in])
        outgoing[index] = tuple(meter(gradient) for gradient in grads_out)

    return [node.register_prehook(before), node.register_hook(after)]


def _records(
    recorded: graph.Graph,
    names: graph.Names,
    locations: dict[Node, graph.NodeLocation],
    numbers: list[tuple[float, GradStats | None, tuple[GradStats | None, ...]]],
) -> tuple[NodeRecord, ...]:
    index_of = {node: index for index, node in enumerate(recorded.nodes)}
    records = []
    for index, node in enumerate(recorded.nodes):
        parameter = names.of(graph.leaf_tensor(node)) if graph.is_leaf(node) else None
        location = locations.get(node)
        module = location.module if location is not None else None
        shape, dtype, _ = graph.describe(node)[0]
        edges = [(at, index_of[used]) for at, (used, _) in enumerate(node.next_functions) if used is not None]
        seconds, incoming, measured = numbers[index]
        outgoing = measured or (None,) * len(node.next_functions)
        records.append(
            NodeRecord(
                index=index,
                op=graph.op(node),
                module=parameter.rpartition(".")[0] if parameter is not None else module,
                exact=parameter is not None or (location is not None and location.exact),
                parameter=parameter,
                shape=shape,
                dtype=dtype,
                incoming=incoming,
                outgoing=combine(outgoing),
                seconds=seconds,
                targets=tuple(target for _, target in edges),
                sent=tuple(outgoing[at] for at, _ in edges),
            )
        )
    return tuple(records)
