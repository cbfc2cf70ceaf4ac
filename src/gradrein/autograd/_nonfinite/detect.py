"""`detect_nonfinite`: check what a backward pass produced, and find the origin if it is not finite."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch.engine import engine_local, intercept_engine, restore_engine
from ..._torch.modes import values_are_real
from ..._torch.nodes import donates_buffers, is_distributed
from ...errors import NonFiniteGradientError
from .._arguments import check_model
from .._engine_call import EngineCall
from .._values import all_finite
from .backward_origin import find_origin


class _State:
    """The open blocks and running passes of one thread, and of the engine's threads that run its passes."""

    def __init__(self) -> None:
        self.models: list[nn.Module | None] = []
        self.depth = 0  # nested passes that are running
        self.error: NonFiniteGradientError | None = None
        self.searching = False  # the search for an origin uses the engine too

    def model(self) -> nn.Module | None:
        """Return the model of the innermost block that has one."""
        return next(filter(None, reversed(self.models)), None)


def _state() -> _State:
    return engine_local("gradrein detect_nonfinite", _State)


_open_blocks = 0
_lock = threading.Lock()


def detect_nonfinite(model: nn.Module | None = None) -> AbstractContextManager[None]:
    """Raise when a backward pass in this block produces NaN or infinite gradients, and name their origin.

    Every pass that this thread starts from Python is checked: ``loss.backward()``, `torch.autograd.grad`,
    `gradrein.backward`. The results (the ``.grad`` of the leaves or the returned gradients, and the loss itself
    if it is a scalar) are checked once, after the pass has finished, so communication between processes is
    unchanged. Only if a value is not finite, the pass runs again node by node to find the origin; tensor
    hooks then run once more.

    Each pass costs one walk over the graph and one read of the gradients. It also costs memory: the graph is kept
    until the loss is deleted, because the search needs it; so a second pass over it is not an error here. A
    graph that can run only once (a compiled function with donated buffers, a sharded model) is not kept, and
    the error says how to find the origin. Batched gradients (``is_grads_batched``) and tensor subclasses
    other than DTensor are not checked.

    Args:
        model: the model whose parameter names to use. Without it, the live modules of the process are searched
            after a non-finite value was found. Required for a sharded model, whose parameters are not in the graph.

    Returns:
        A context manager. It raises at the end of a pass.

    Raises:
        NonFiniteGradientError: a pass produced NaN or infinity; the message and the error's attributes name
            the node, its module, and the saved operand that caused it.
        ArgumentError: (a ValueError and TypeError) `model` is not a module; raised at the call.

    Examples:
        >>> import torch, gradrein
        >>> x = torch.tensor([4.0, 0.0], requires_grad=True)
        >>> with gradrein.detect_nonfinite():
        ...     try:
        ...         x.sqrt().sum().backward()
        ...     except gradrein.errors.NonFiniteGradientError as error:
        ...         print(error.node, error.operand, error.rows)
        SqrtBackward0 result (1,)

    See Also:
        [`gradrein.trace`][], [`gradrein.backward`][], [`gradrein.errors.NonFiniteGradientError`][]
    """
    if model is not None:
        check_model(model, "detect_nonfinite")
    return _detecting(model)


@contextmanager
def _detecting(model: nn.Module | None) -> Generator[None, None, None]:
    global _open_blocks
    state = _state()
    with _lock:
        if _open_blocks == 0:
            intercept_engine(_run)
        _open_blocks += 1
    state.models.append(model)
    try:
        yield
    finally:
        state.models.pop()
        with _lock:
            _open_blocks -= 1
            if _open_blocks == 0:
                restore_engine()


def _run(
    original: Callable[..., Any],
    outputs: tuple[Tensor | GradientEdge, ...],
    grads: tuple[Tensor | None, ...],
    retain_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor | GradientEdge, ...] = (),
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace the engine's `run_backward`, with its arguments."""
    state = _state()
    if not state.models or state.searching or not values_are_real((*outputs, *grads)):
        return original(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
    leaves, runs_once = _survey(outputs)
    keep = retain_graph or runs_once is None
    with _lock:
        state.depth += 1
    try:
        result = original(outputs, grads, keep, create_graph, inputs, *args, **kwargs)
        if state.error is None:
            wanted = inputs or (*leaves, *_sharded_parameters(state.model(), leaves))
            produced = result if result is not None and len(result) else [_grad(tensor) for tensor in wanted]
            finished = EngineCall(outputs, tuple(wanted), grads, create_graph=create_graph)
            state.error = _check(state, finished, produced, runs_once)
        # A nested pass (a reentrant checkpoint) must not end the outer one: other processes may wait for what it
        # still has to send.
        if state.depth == 1 and state.error is not None:
            raise state.error
    finally:
        with _lock:
            state.depth -= 1
            if state.depth == 0:
                state.error = None
    return result


def _survey(outputs: Sequence[Tensor | GradientEdge]) -> tuple[tuple[Tensor, ...], str | None]:
    """Return the leaves of a graph, and why it can run only once, if so."""
    nodes = graph.walk(outputs)
    leaves = tuple(graph.leaf_tensor(node) for node in nodes if graph.is_leaf(node))
    reasons = (_why_once(node) for node in nodes if graph.is_custom(node))
    return leaves, next(filter(None, reasons), None)


def _why_once(node: Node) -> str | None:
    if donates_buffers(node):
        return (
            "the graph holds a compiled function that overwrites what it saved. Set "
            "torch._functorch.config.donated_buffer = False before compiling, or run uncompiled."
        )
    if is_distributed(node):
        return (
            "the model is sharded, and its weights are freed when the pass is over. Run this step with "
            "gradrein.trace in place of backward: its first node with non-finite values is the origin."
        )
    return None


def _sharded_parameters(model: nn.Module | None, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the model's parameters that are not in the graph: sharded training computes with copies."""
    if model is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    known = {id(leaf) for leaf in leaves}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in known]


def _grad(tensor: Tensor | GradientEdge) -> Tensor | None:
    return tensor.grad if isinstance(tensor, Tensor) and (tensor.is_leaf or tensor.retains_grad) else None


def _check(
    state: _State, finished: EngineCall, produced: Sequence[Tensor | None], freed_because: str | None
) -> NonFiniteGradientError | None:
    """Return the error to raise, or None if everything is finite."""
    losses = [o.detach() for o in finished.outputs if isinstance(o, Tensor) and o.numel() == 1]
    if all_finite([*losses, *(gradient for gradient in produced if gradient is not None)]):
        return None
    starts_finite = all_finite([gradient for gradient in finished.grads if gradient is not None])
    if state.depth > 1 and not starts_finite:
        return None  # it came from the outer pass, which will search for it
    state.searching = True
    try:
        return find_origin(finished, produced, state.model(), freed_because)
    except Exception as error:  # a failed search must not hide that values are not finite
        return NonFiniteGradientError(f"NaN or infinity in this pass. The search for its origin failed: {error!r}")
    finally:
        state.searching = False
