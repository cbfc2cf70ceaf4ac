"""Graphs of ATen ops: traced from Python without values, and compiled."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from .storage import storage_of

# Without it a trace records others in place of ops that have a kernel as well as a decomposition: not the same bits.
RECORDS_WHAT_RUNS = hasattr(_python_dispatch, "autograd_would_have_decomposed")


@contextmanager
def without_tracing() -> Generator[None, None, None]:
    """While open, tensors are made for real, and no op is recorded."""
    with _disable_current_modes():
        yield


def fake_mode() -> Any:
    """Return a mode in which tensors have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def writes_to_inputs(graph: fx.GraphModule) -> bool:
    """Return whether an op of a traced graph writes to the memory of an input."""
    inputs = {storage_of(node.meta["val"]) for node in graph.graph.nodes if node.op == "placeholder"}
    written = (
        value.meta["val"]
        for node in graph.graph.nodes
        for argument, given in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(given)
        if isinstance(value, fx.Node)
    )
    return any(isinstance(value, Tensor) and storage_of(value) in inputs for value in written)


def updates_statistics(graph: fx.GraphModule) -> bool:
    """Return whether an op is batch normalisation with running statistics, whose schema does not say that it writes."""
    for node in graph.graph.nodes:
        given = {argument.name: value for argument, value in _arguments(node)}
        reads_them = given.get("running_mean") is not None and "backward" not in str(node.target)
        if reads_them and given.get("training", True):
            return True
    return False


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """Return the arguments of an op as its schema has them, each with what it is given."""
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else []
    positional = zip(arguments, node.args, strict=False)
    return [*positional, *((one, node.kwargs[one.name]) for one in arguments if one.name in node.kwargs)]


def trace(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Record what a function does to tensors without values, autograd and all."""
    from torch.fx.experimental.proxy_tensor import make_fx

    traced: fx.GraphModule = make_fx(function)(*fakes)
    return traced


def prune(graph: fx.GraphModule) -> None:
    """Remove the ops of a graph whose results nothing needs."""
    graph.graph.eliminate_dead_code()
    graph.recompile()


def tracer_in_use() -> Any:
    """Return what records ops at the moment."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def computed(tensor: Tensor, tracer: Any) -> Tensor | None:
    """Return the value of a traced tensor; None if it depends on an input or on chance."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else _computed(slot.proxy.node, tracer.root)


def _computed(end: fx.Node, root: Any) -> Tensor | None:
    above = {end}
    stack = [end]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in above:
                above.add(node)
                stack.append(node)
    if any(node.op == "placeholder" or is_random(node) for node in above):
        return None
    values: dict[fx.Node, Any] = {}
    with without_tracing():
        for node in end.graph.nodes:
            if node in above and node.op == "get_attr":
                values[node] = getattr(root, str(node.target))
            elif node in above:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    value: Tensor = values[end]
    return value


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@contextmanager
def as_recorded(*, grad_mode: bool = False) -> Generator[None, None, None]:
    """While open, ops run as they were recorded: every cast is in the graph, and none has a gradient."""
    with torch.set_grad_enabled(grad_mode), torch._C._DisableAutocast():
        yield


def needs_grad_mode(graph: fx.GraphModule) -> bool:
    """Return whether an op of a graph leaves out what the graph needs of it unless gradients are recorded."""
    return any(node.target is torch.ops.aten.mkldnn_rnn_layer.default for node in graph.graph.nodes)


def loses_workspace(graph: fx.GraphModule) -> bool:
    """Return whether inductor would not hand on what a recurrent layer keeps for its own gradient."""
    return any(node.target is torch.ops.aten.mkldnn_rnn_layer_backward.default for node in graph.graph.nodes)


def compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph with inductor. Random numbers come from torch's generator, as without it."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with as_recorded(), config.patch(fallback_random=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about itself, which would stop the compilation where they are errors
        function: Any = compile_fx(graph, list(inputs))
    return function  # type: ignore[no-any-return]
