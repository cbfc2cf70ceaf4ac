"""Everything private in torch that this room touches, checked on torch 2.13.0 and 2.15.0."""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, overrides
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.jit import _builtins
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import GraphExecGroup

from ..graph import is_leaf, leaf_tensor, op

Hook = Callable[..., Any]

# Ops whose backward gives wrong numbers, without an error, when torch vectorises it.
WRONG_WHEN_VECTORISED = frozenset({"AsStridedScatterBackward0"})


def run_engine(
    outputs: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor | GradientEdge],
    *,
    allow_unreachable: bool,
    accumulate: bool,
) -> tuple[Tensor | None, ...]:
    """Run torch's own engine; with `accumulate` gradients go to ``.grad``, else they are returned."""
    return _engine_run_backward(
        tuple(outputs),
        tuple(grads),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=allow_unreachable,
        accumulate_grad=accumulate,
    )


def inside_func_transform() -> bool:
    """Tell whether a `torch.func` transform is running."""
    return bool(torch._C._are_functorch_transforms_active())


# Bound as it is: while a call is traced, the compiler knows torch's own function, and nothing in its place.
torch_grad: Callable[..., Any] = torch.autograd.grad


def is_traced_whole() -> bool:
    """Tell whether the compiler is tracing this call and has been told to put gradients into its graph."""
    return torch.compiler.is_compiling() and getattr(torch._dynamo.config, "trace_autograd_ops", False)


def is_tensor_like(value: Any) -> bool:
    """Tell whether this is a tensor, or something that acts as one for torch's functions."""
    return bool(overrides.is_tensor_like(value))  # type: ignore[no-untyped-call]


def overrides_functions(kind: type) -> bool:
    """Tell whether tensors of this type have a say in what torch's functions do with them."""
    disabled = torch._C._disabled_torch_function_impl
    return kind is not Tensor and getattr(kind, "__torch_function__", disabled) is not disabled


@contextmanager
def unseen_by_overrides() -> Generator[None, None, None]:
    """Look at tensors, while open, without their subclasses or any mode being told."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def engine_runs(error: BaseException) -> int:
    """Return how many runs of the engine, one inside the other, this exception came out of."""
    found, trace = 0, error.__traceback__
    while trace is not None:
        found += trace.tb_frame.f_code is _engine_run_backward.__code__
        trace = trace.tb_next
    return found


def same_shape(first: Sequence[int], second: Sequence[int]) -> bool:
    """Tell whether two shapes are equal; while torch traces, sizes that it cannot know yet become a condition."""
    if all(type(size) is int for size in (*first, *second)):
        return tuple(first) == tuple(second)
    from torch.fx.experimental.symbolic_shapes import expect_true, sym_eq  # a second to import, and seldom needed

    return bool(expect_true(sym_eq(torch.Size(first), torch.Size(second))))


def is_cpp_nested(tensor: Tensor) -> bool:
    """Tell whether this is one of the older nested tensors, which have no shape."""
    return tensor.is_nested and tensor.layout == torch.strided


def nested_sizes(tensor: Tensor) -> list[list[int]]:
    """Return the shape of each part of one of the older nested tensors."""
    sizes: list[list[int]] = tensor._nested_tensor_size().tolist()
    return sizes


def is_cpp_nested_edge(edge: GradientEdge) -> bool:
    """Tell whether the gradient that arrives at this edge is one of the older nested tensors."""
    return bool(edge.node._input_metadata[edge.output_nr].is_cpp_nested_tensor)


ENGINE_MODULE = _engine_run_backward.__module__
# What torch says where code meets a tensor whose first dimension is hidden and cannot go on.
_BATCH_REFUSED = re.compile(
    r"vmap|Batching rule|BatchedTensor|LegacyBatched|doesn't have storage|Could not run 'aten::|not have is_contiguous"
)
# What it says of a custom Function or a hook that returned something else than it must, in a batch or not.
_WRONG_RETURN = re.compile(
    "returned an incorrect number of|returned a gradient different|expected Variable|' has changed the |can't replace a"
    "|input_is_complex == grad_is_complex"
)


def blames_batch(text: str) -> bool:
    """Tell whether torch's text says that the code cannot run on a batch."""
    return _BATCH_REFUSED.search(text) is not None


def blames_return(text: str) -> bool:
    """Tell whether torch's text is about what a custom Function or a hook returned."""
    return _WRONG_RETURN.search(text) is not None


class Batch:
    """The first dimension of some tensors, hidden from the ops that run while this is open.

    `torch.func.vmap` would do the same, but it is silently wrong over the backward of `cdist`; this is the
    older machinery, which `torch.autograd.grad(is_grads_batched=True)` uses as well.
    """

    def __init__(self, size: int, level: int) -> None:
        self.size = size
        self._level = level

    def hide(self, tensor: Tensor) -> Tensor:
        """Hide the first dimension."""
        return torch._add_batch_dim(tensor, 0, self._level)

    def show(self, tensor: Tensor) -> Tensor:
        """Put the dimension back in front; a tensor that has none gets it by repetition."""
        return torch._remove_batch_dim(tensor, self._level, self.size, 0)

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Let ops run as if the batch were not open: random ones, for example, are refused inside."""
        torch._C._vmapmode_decrement_nesting()
        try:
            yield
        finally:
            torch._C._vmapmode_increment_nesting()


@contextmanager
def open_batch(size: int) -> Generator[Batch, None, None]:
    """Open a batch of the given size."""
    level = torch._C._vmapmode_increment_nesting()
    try:
        yield Batch(size, level)
    finally:
        torch._C._vmapmode_decrement_nesting()


@contextmanager
def replaced_apply(
    nodes: Sequence[Node], make: Callable[[Node, Callable[..., Any]], Callable[..., Any]]
) -> Generator[None, None, None]:
    """Replace, while open, what the engine calls on nodes made by a Python `torch.autograd.Function`."""
    try:
        for node in nodes:
            node.apply = make(node, node.apply)  # type: ignore[attr-defined]
        yield
    finally:
        for node in nodes:
            vars(node).pop("apply", None)


def fit(gradient: Tensor, node: Node, output_nr: int) -> Tensor:
    """Bring a gradient to the shape, dtype and device of the value it belongs to, as torch's engine does.

    Nodes return gradients of broadcast inputs unreduced, and some in another dtype.
    """
    described = node._input_metadata[output_nr]
    if not described.is_nested_tensor and gradient.shape != torch.Size(described.shape):
        gradient = gradient.sum_to_size(described.shape)
    dtype = leaf_tensor(node).grad_dtype if is_leaf(node) else described.dtype
    if dtype is not None and gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    if gradient.dim() == 0 and gradient.device != described.device:
        gradient = gradient.to(described.device)
    return gradient


def output_count(node: Node) -> int:
    """Return how many gradients the node takes."""
    return len(node._input_metadata)


def zeros_for(node: Node, output_nr: int) -> Tensor:
    """Return a zero gradient for one output of the node."""
    described = node._input_metadata[output_nr]
    return torch.zeros(described.shape, dtype=described.dtype, device=described.device)


def hooks_before(node: Node) -> list[Hook]:
    """Return the hooks registered with ``node.register_prehook``."""
    return _listed(node.register_prehook(_nothing))


def hooks_after(node: Node) -> list[Hook]:
    """Return the hooks registered with ``node.register_hook``."""
    return _listed(node.register_hook(_nothing))


def _nothing(*_: Any) -> None:
    pass


def _listed(handle: Any) -> list[Hook]:
    # torch has no call that lists a node's hooks, but a new one joins the dict that holds them all.
    handle.remove()
    return list(handle.hooks_dict_ref().values())


@contextmanager
def checkpoints_recomputed_once() -> Generator[None, None, None]:
    """Let each checkpointed region be computed again once, not at every value that is unpacked."""
    if GraphExecGroup._get_current_group() is not None:
        yield
        return
    with GraphExecGroup():
        yield


class _WatchedEngine:
    """torch's engine, with one method taken over and the rest left alone."""

    def __init__(self, engine: Any, run: Callable[..., Any]) -> None:
        self.engine = engine
        self.run_backward = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def take_over_engine(run: Callable[..., Any]) -> None:
    """Let `run(original, ...)` stand before every backward pass that starts in Python, in all threads."""
    engine = torch.autograd.Variable._execution_engine
    taken = _WatchedEngine(engine, partial(run, engine.run_backward))
    torch.autograd.Variable._execution_engine = taken  # type: ignore[assignment]


def give_back_engine() -> None:
    """Undo `take_over_engine`."""
    taken = torch.autograd.Variable._execution_engine
    torch.autograd.Variable._execution_engine = taken.engine  # type: ignore[attr-defined]


_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def values_are_real(tensors: Sequence[Any]) -> bool:
    """Tell whether these are tensors with values to look at: not while compiling, not inside a vmap."""
    if torch._C._are_functorch_transforms_active():
        return False
    if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        return False
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return not any(isinstance(tensor, Tensor) and (tensor.is_meta or legacy(tensor)) for tensor in tensors)


def gives_away_saved(node: Node) -> bool:
    """Tell whether a compiled function's backward overwrites what it saved, so that it can run only once."""
    return op(node) == "CompiledFunctionBackward" and bool(node._forward_cls.metadata.bw_donated_idxs)  # type: ignore[attr-defined]


def communicates(node: Node) -> bool:
    """Tell whether this node of a Python Function was put there by torch's distributed training."""
    defined_in: str = node._forward_cls.__module__  # type: ignore[attr-defined]
    return defined_in.startswith("torch.distributed")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that is in this process; any other tensor as it is."""
    local: Tensor = tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor  # type: ignore[attr-defined]
    return local


def stand_in_for(ours: Callable[..., Any], theirs: str) -> None:
    """Let `torch.jit.script` compile a call of our function as torch's operator of that name."""
    if _builtins._builtin_table is None:
        _builtins._builtin_ops.append((ours, theirs))  # the table is made from these when a script first needs it
    else:
        _builtins._builtin_table[id(ours)] = theirs
