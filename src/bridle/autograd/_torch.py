"""Everything private in torch that this room touches, checked on torch 2.13.0 and 2.15.0."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.utils.checkpoint import GraphExecGroup

from ..graph import is_leaf, leaf_tensor, op

Hook = Callable[..., Any]


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


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that is in this process; any other tensor as it is."""
    local: Tensor = tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor  # type: ignore[attr-defined]
    return local
