"""`trace`: an ordinary backward pass on torch's engine, watched through hooks on its nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import graph
from ._records import NodeRecord, Trace
from ._stats import Meter, Stats, together

# Ops whose backward hands on every value of its gradient, in another shape.
_RESHAPES = frozenset(
    f"{name}Backward{number}"
    for name in ("Permute", "ReshapeAlias", "Squeeze", "T", "Transpose", "UnsafeView", "Unsqueeze", "View")
    for number in range(3)
)


def trace(
    loss: Tensor,
    model: nn.Module | None = None,
    *,
    gradient: Tensor | None = None,
    retain_graph: bool = False,
    norms: bool = True,
    record: graph.ModuleRecord | None = None,
) -> Trace:
    """Run ``loss.backward()`` and record what every node did.

    The pass is torch's own: the same ``.grad``, hooks, communication and freeing of the graph. The record
    holds numbers and names only, so it keeps no gradient and no part of the graph alive.

    Args:
        loss: what to differentiate.
        model: the model whose names to use. Without it, those of the modules alive in the process are looked
            up, which takes some milliseconds.
        gradient: the gradient `loss` starts from, if it is not a scalar.
        retain_graph: keep the graph for another pass.
        norms: also measure every gradient. Without, only shapes and times are recorded, which costs less.
        record: what `graph.record_modules` saw of the forward pass. With it the module of every node is
            known; without it, a node that uses no parameter counts to the last module before it.

    Returns:
        The record. ``print`` it for a table by module.

    Example:
        >>> import torch, bridle
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with torch.no_grad():
        ...     _ = model[0].weight.fill_(1.0), model[0].bias.zero_()
        >>> trace = bridle.trace(model(torch.tensor([[1.0, -3.0]])).sum(), model)
        >>> for node in trace.nodes:
        ...     print(node.op, node.outgoing and f"{node.outgoing.zeros} of {node.outgoing.size} are zero")
        SumBackward0 0 of 2 are zero
        ReluBackward0 2 of 2 are zero
        AddmmBackward0 6 of 6 are zero
        AccumulateGrad None
        TBackward0 4 of 4 are zero
        AccumulateGrad None
    """
    read = graph.read(loss)
    names = graph.find_names(model)
    watched = _Watch(len(read.nodes), Meter() if norms else None)
    handles = [handle for index, node in enumerate(read.nodes) for handle in watched.hook(index, node)]
    started = perf_counter()
    try:
        torch.autograd.backward(loss, gradient, retain_graph=retain_graph)
    finally:
        seconds = perf_counter() - started
        for handle in handles:
            handle.remove()
    return Trace(_records(read, names, graph.places(read, names, record), watched), seconds)


@dataclass
class _Watch:
    """What the hooks write down, by the index of the node.

    They hold no node: that would be a cycle, and keep it alive.
    """

    count: int
    meter: Meter | None
    started: list[float] = field(init=False)
    seconds: list[float] = field(init=False)
    incoming: list[Stats | None] = field(init=False)
    outgoing: list[tuple[Stats | None, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.started, self.seconds = [0.0] * self.count, [0.0] * self.count
        self.incoming, self.outgoing = [None] * self.count, [()] * self.count

    def hook(self, index: int, node: Node) -> list[Any]:
        meter, started, seconds = self.meter, self.started, self.seconds
        reshapes = graph.op(node) in _RESHAPES

        def before(_: Sequence[Tensor | None]) -> None:
            started[index] = perf_counter()

        def after(grads_out: Sequence[Tensor | None], grads_in: Sequence[Tensor | None]) -> None:
            seconds[index] = perf_counter() - started[index]
            if meter is not None:
                self.incoming[index] = together([meter(gradient) for gradient in grads_in])
                if reshapes:
                    _note_view(meter, grads_out[0], grads_in[0])
                self.outgoing[index] = tuple(meter(gradient) for gradient in grads_out)

        return [node.register_prehook(before), node.register_hook(after)]


def _note_view(meter: Meter, moved: Tensor | None, gradient: Tensor | None) -> None:
    if moved is None or gradient is None or moved.layout != torch.strided or moved.is_nested:
        return
    same_memory = moved.data_ptr() == gradient.data_ptr()
    if same_memory and moved.numel() == gradient.numel() and moved.dtype == gradient.dtype:
        meter.same(moved, gradient)


def _records(
    read: graph.Graph, names: graph.Names, places: dict[Node, graph.Place], watched: _Watch
) -> tuple[NodeRecord, ...]:
    index_of = {node: index for index, node in enumerate(read.nodes)}
    records = []
    for index, node in enumerate(read.nodes):
        parameter = names.of(graph.leaf_tensor(node)) if graph.is_leaf(node) else None
        place = places.get(node)
        module = place.module if place is not None else None
        shape, dtype, _ = graph.describe(node)[0]
        edges = [(at, index_of[used]) for at, (used, _) in enumerate(node.next_functions) if used is not None]
        outgoing = watched.outgoing[index] or (None,) * len(node.next_functions)
        records.append(
            NodeRecord(
                index=index,
                op=graph.op(node),
                module=parameter.rpartition(".")[0] if parameter is not None else module,
                exact=parameter is not None or (place is not None and place.exact),
                parameter=parameter,
                shape=shape,
                dtype=dtype,
                incoming=watched.incoming[index],
                outgoing=together(outgoing),
                seconds=watched.seconds[index],
                targets=tuple(target for _, target in edges),
                sent=tuple(outgoing[at] for at, _ in edges),
            )
        )
    return tuple(records)
