"""`detect_anomaly`: one look at what a backward pass has yielded, and a post-mortem if it is not finite."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from ..errors import NonFiniteGradientError
from . import _torch
from ._origin import Failure, post_mortem
from ._stats import plain_values


class _Thread(threading.local):
    """What one thread has open."""

    def __init__(self) -> None:
        self.models: list[nn.Module | None] = []
        self.depth = 0  # passes that are running, one inside the other
        self.found: NonFiniteGradientError | None = None
        self.looking = False  # a post-mortem is running, which uses the engine too


_this_thread = _Thread()
_open_blocks = 0
_lock = threading.Lock()


@contextmanager
def detect_anomaly(model: nn.Module | None = None) -> Generator[None, None, None]:
    """Raise, with its origin, when a backward pass in this block yields NaN or infinite gradients.

    Any pass counts that this thread starts from Python: ``loss.backward()``, `torch.autograd.grad`, ours.
    What it yielded (the leaves' ``.grad`` or the returned gradients, and the loss itself if it is a scalar)
    is looked at once, after the pass has run to its end, so communication between processes is what it always
    is. Only if something is not finite, the pass is run again node by node to find where it began; the hooks
    of tensors then run once more.

    What it costs: one walk over the graph and one reading of the gradients per pass. And memory: the graph is
    kept until the loss is dropped, because without it nothing could be found afterwards; so a second pass
    over it is no error here. Where a graph can run only once (a compiled function that overwrites what it
    saved, a sharded model) it is not kept, and the error says how to find the origin. Batched gradients
    (``is_grads_batched``) and tensor subclasses other than DTensor are not looked at.

    Args:
        model: the model whose names to use. Without it, the modules alive in the process are searched when
            something has been found. A sharded model must be given: its parameters are not in the graph.

    Yields:
        Nothing.

    Raises:
        NonFiniteGradientError: a pass yielded NaN or infinity; the message and the error's attributes say in
            which node of which module it began, and which saved operand did it.

    Example:
        >>> import torch, bridle
        >>> x = torch.tensor([4.0, 0.0], requires_grad=True)
        >>> with bridle.detect_anomaly():
        ...     try:
        ...         x.sqrt().sum().backward()
        ...     except bridle.errors.NonFiniteGradientError as error:
        ...         print(error.node, error.operand, error.rows)
        SqrtBackward0 result (1,)
    """
    global _open_blocks
    with _lock:
        if _open_blocks == 0:
            _torch.take_over_engine(_run)
        _open_blocks += 1
    _this_thread.models.append(model)
    try:
        yield
    finally:
        _this_thread.models.pop()
        with _lock:
            _open_blocks -= 1
            if _open_blocks == 0:
                _torch.give_back_engine()


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
    """Stand in for the engine's own method, whose arguments these are."""
    state = _this_thread
    if not state.models or state.looking or not _torch.values_are_real((*outputs, *grads)):
        return original(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
    survey = _survey(outputs)
    keep = retain_graph or survey.once is None
    state.depth += 1
    try:
        result = original(outputs, grads, keep, create_graph, inputs, *args, **kwargs)
        if state.found is None:
            wanted = inputs or (*survey.leaves, *_sharded(survey.leaves))
            yielded = result if result is not None and len(result) else [_grad(tensor) for tensor in wanted]
            state.found = _look(Failure(outputs, grads, wanted, create_graph, survey.once), yielded)
        # A pass inside a pass (a reentrant checkpoint) must not end the outer one: other processes may be
        # waiting for what it still has to send.
        if state.depth == 1 and state.found is not None:
            raise state.found
    finally:
        state.depth -= 1
        if state.depth == 0:
            state.found = None
    return result


class _Survey(NamedTuple):
    leaves: tuple[Tensor, ...]
    once: str | None  # why this graph can run only once, if that is so


def _survey(outputs: Sequence[Tensor | GradientEdge]) -> _Survey:
    """Find the leaves of the graph; a plain walk, several times as fast as reading it whole."""
    roots = [o.node if isinstance(o, GradientEdge) else o.grad_fn or graph.edge_of(o).node for o in outputs]
    seen: set[Node] = set(roots)
    stack, leaves, once = list(seen), [], None
    while stack:
        node = stack.pop()
        if graph.is_leaf(node):
            leaves.append(graph.leaf_tensor(node))
        elif graph.is_custom(node):
            once = once or _why_once(node)
        for used, _ in node.next_functions:
            if used is not None and used not in seen:
                seen.add(used)
                stack.append(used)
    return _Survey(tuple(leaves), once)


def _why_once(node: Node) -> str | None:
    if _torch.gives_away_saved(node):
        return (
            "the graph holds a compiled function that overwrites what it saved. Set "
            "torch._functorch.config.donated_buffer = False before compiling, or run uncompiled."
        )
    if _torch.communicates(node):
        return (
            "the model is sharded, and its weights are gone when the pass is over. Run this step with "
            "bridle.trace in place of backward: its first node with non-finite values is the origin."
        )
    return None


def _sharded(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the model's own parameters where the graph shows others: sharded training computes with copies."""
    model = next(filter(None, reversed(_this_thread.models)), None)
    if model is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    known = {id(leaf) for leaf in leaves}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in known]


def _grad(tensor: Tensor | GradientEdge) -> Tensor | None:
    return tensor.grad if isinstance(tensor, Tensor) and (tensor.is_leaf or tensor.retains_grad) else None


def _look(failure: Failure, yielded: Sequence[Tensor | None]) -> NonFiniteGradientError | None:
    """Return what to raise, or None if all is well."""
    losses = [o.detach() for o in failure.outputs if isinstance(o, Tensor) and o.numel() == 1]
    if all_finite([*losses, *(gradient for gradient in yielded if gradient is not None)]):
        return None
    started_well = all_finite([gradient for gradient in failure.grads if gradient is not None])
    if _this_thread.depth > 1 and not started_well:
        return None  # it came from the pass around this one, which will look for it
    _this_thread.looking = True
    try:
        return post_mortem(failure, yielded, next(filter(None, reversed(_this_thread.models)), None))
    except Exception as error:  # what was found must be told, whatever goes wrong while looking for its cause
        return NonFiniteGradientError(f"NaN or infinity in this pass. Looking for its origin failed: {error!r}")
    finally:
        _this_thread.looking = False


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Tell whether there is no NaN and no infinity, reading everything once and waiting once per device.

    A sum is finite only if all its terms are, and takes a thirtieth of the time of `torch.isfinite` on CPU.
    The other way round it may overflow: then each value is asked.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            values = plain_values(_torch.local_part(tensor.detach()))
            if values is None:
                continue
            values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
            by_device.setdefault(values.device, []).append(values)
        for there in by_device.values():
            sums = torch.stack([_sum(values) for values in there])
            if not torch.isfinite(sums).all() and not all(torch.isfinite(values).all() for values in there):
                return False
    return True


def _sum(values: Tensor) -> Tensor:
    narrow = values.dtype in (torch.float16, torch.bfloat16)
    return values.sum(dtype=torch.float32 if narrow else None).double()
