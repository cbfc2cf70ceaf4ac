"""torch's engine: run it, intercept it, and do what it does around one node (hooks, casts, zeros)."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from .nodes import is_leaf, leaf_tensor

_T = TypeVar("_T")


# An alias, not a function: while a call is traced, the compiler recognises only torch's own.
torch_grad: Callable[..., Any] = torch.autograd.grad


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
    """Run torch's engine; with `accumulate` gradients go to ``.grad``, else they are returned."""
    return _engine_run_backward(
        tuple(outputs),
        tuple(grads),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=allow_unreachable,
        accumulate_grad=accumulate,
    )


def engine_local(key: str, make: Callable[[], _T]) -> _T:
    """Return this thread's object of that name; in a thread of the engine, that of the thread that started the pass.

    On an accelerator a pass runs in another thread than the one that started it, and so does what nodes and hooks
    call. torch hands on the objects that are stored with it.
    """
    if not torch._C._is_key_in_tls(key):
        made = make()
        held = sys.getrefcount(made)
        torch._C._stash_obj_in_tls(key, made)
        if sys.getrefcount(made) == held:  # torch 2.6 drops a reference at the end of the thread, and never took it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    stored: _T = torch._C._get_obj_in_tls(key)
    return stored


def nested_engine_runs(error: BaseException) -> int:
    """Return how many engine runs, one inside the other, are in the traceback of this exception."""
    found, trace = 0, error.__traceback__
    while trace is not None:
        found += trace.tb_frame.f_code is _engine_run_backward.__code__
        trace = trace.tb_next
    return found


def intercept_engine(run: Callable[..., Any]) -> None:
    """Call `run(original, ...)` for every backward pass that starts in Python, in all threads."""
    engine = torch.autograd.Variable._execution_engine
    methods = {name: getattr(engine, name) for name in dir(engine) if not name.startswith("_")}
    methods["run_backward"] = partial(run, engine.run_backward)
    torch.autograd.Variable._execution_engine = SimpleNamespace(engine=engine, **methods)  # type: ignore[assignment]


def restore_engine() -> None:
    """Undo `intercept_engine`."""
    intercepted = torch.autograd.Variable._execution_engine
    torch.autograd.Variable._execution_engine = intercepted.engine  # type: ignore[attr-defined]


def validate_grad(gradient: Tensor, node: Node, output_nr: int) -> Tensor:
    """Bring a gradient to the shape, dtype and device of its value, as torch's engine does.

    Nodes return gradients of broadcast inputs unreduced, and some in another dtype.
    """
    metadata = node._input_metadata[output_nr]
    if not metadata.is_nested_tensor and gradient.shape != torch.Size(metadata.shape):
        gradient = gradient.sum_to_size(metadata.shape)
    dtype = metadata.dtype
    if is_leaf(node):  # a torch without `grad_dtype` casts to the dtype of the leaf
        dtype = getattr(leaf_tensor(node), "grad_dtype", dtype)
    if dtype is not None and gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    if gradient.dim() == 0 and gradient.device != metadata.device:
        gradient = gradient.to(metadata.device)
    return gradient
