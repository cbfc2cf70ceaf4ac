"""Graphs of ATen ops: traced from Python without values, and compiled."""

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
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


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, notes the memory that ops write to.

    Attributes:
        storages: the memory, as `storage_of` numbers it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {**dict(zip((one.name for one in arguments), args, strict=False)), **kwargs}
        # Batch normalisation updates statistics that its schema does not say are written.
        trains = given.get("training", given.get("train", True))
        for one in arguments:
            is_written = one.alias_info is not None and one.alias_info.is_write
            if is_written or (trains and one.name in ("running_mean", "running_var")):
                found = tree_leaves(given.get(one.name))
                self.storages.update(storage_of(x) for x in found if isinstance(x, Tensor))
        return func(*args, **kwargs)


def trace(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Record what a function does to tensors without values, autograd and all."""
    from torch.fx.experimental.proxy_tensor import make_fx

    traced: fx.GraphModule = make_fx(function)(*fakes)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


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
    found: Tensor = values[end]
    return found


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
        found: Any = compile_fx(graph, list(inputs))
    return found  # type: ignore[no-any-return]


def _is_own(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "gradrein"


def own_ops(graph: fx.GraphModule) -> list[str]:
    """Return the names of ops of a graph that are gradrein's own, each once."""
    targets = [node.target for node in graph.graph.nodes if _is_own(node)]
    return sorted({str(target).split(".")[1] for target in targets})


def lacks_compiler(error: BaseException | None) -> bool:
    """Return whether an error says that there is no C++ compiler."""
    from torch._inductor.exc import InvalidCxxCompiler

    while error is not None:
        if isinstance(error, InvalidCxxCompiler):
            return True
        error = error.__cause__ or error.__context__
    return False


# Ops that look at values and raise, which inductor compiles without looking. The targets of `nll_loss` are looked at by
# `check_targets`.
_LOSE_CHECKS = ("binary_cross_entropy", "bernoulli", "scatter", "multi_margin_loss", "multilabel_margin_loss")


def loses_checks(traced: fx.GraphModule) -> str:
    """Return an op that raises for some values, and would not once it is compiled; empty if there is none."""
    names = (getattr(node.target, "__name__", "") for node in traced.graph.nodes if node.op == "call_function")
    fixed = (".float", ".p")  # a probability that is a number was looked at when the step was captured
    return next((n for n in names if n.startswith(_LOSE_CHECKS) and not n.endswith(fixed)), "")


def check_targets(traced: fx.GraphModule) -> None:
    """Make the flag that a graph returns first also say whether all targets of `nll_loss` are in range."""
    aten, output = torch.ops.aten, next(node for node in traced.graph.nodes if node.op == "output")
    flag, *rest = output.args[0]
    with traced.graph.inserting_before(output):
        for node in traced.graph.nodes:
            if node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
                scores, targets, ignored = node.args[0], node.args[1], node.args[4]
                classes = scores.meta["val"].shape[0 if scores.meta["val"].dim() == 1 else 1]
                call = traced.graph.call_function
                low, high = call(aten.ge.Scalar, (targets, 0)), call(aten.lt.Scalar, (targets, classes))
                inside = call(aten.logical_and.default, (low, high))
                known = call(aten.logical_or.default, (inside, call(aten.eq.Scalar, (targets, ignored))))
                flag = call(aten.logical_and.default, (flag, call(aten.all.default, (known,))))
    output.args = ([flag, *rest],)
    traced.recompile()
