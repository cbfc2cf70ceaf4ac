"""A batch of gradients of the same outputs: vectorised where torch can, in a loop where it cannot."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from .._torch.engine import ENGINE_MODULE
from .._torch.vmap import (
    WRONG_WHEN_VECTORISED,
    BatchDim,
    is_batch_refused_message,
    is_wrong_return_message,
    open_batch,
    wrapped_apply,
)
from ..errors import BackwardError, GradreinWarning, GraphFreedError
from ._diagnosis.context import ErrorContext
from ._diagnosis.exception_source import innermost_frame, is_user_raise, module_of
from ._engine import run
from ._engine_call import EngineCall


def run_batched(call: EngineCall, size: int, chunk_size: int | None) -> tuple[Tensor | None, ...]:
    """Run the engine for a batch of gradients, `chunk_size` of them at a time.

    Args:
        call: the run; the first dimension of every gradient in it is the batch.
        size: the size of that dimension.
        chunk_size: how many to vectorise at once; None for all.

    Returns:
        The gradients, each with the batch as its first dimension; None for unused inputs.
    """
    nodes = graph.walk(call.outputs)
    wrong = {type(node).__name__ for node in nodes} & WRONG_WHEN_VECTORISED
    if wrong:
        ops = ", ".join(sorted(wrong))
        _warn(f"torch vectorises {ops} wrongly; the whole backward runs once per gradient instead.")
        return _run_looped(call, size)
    custom = [node for node in nodes if graph.is_custom(node)]
    step = chunk_size or size
    if step >= size:
        return _run_chunk(call, size, custom)
    results = []
    for start in range(0, size, step):
        part = replace(call, grads=tuple(None if g is None else g[start : start + step] for g in call.grads))
        last = start + step >= size
        chunk = part if last else replace(part, retain_graph=True)
        results.append(_run_chunk(chunk, min(step, size - start), custom))
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*results, strict=True))


def _run_chunk(call: EngineCall, size: int, custom: list[Node]) -> tuple[Tensor | None, ...]:
    try:
        with (
            open_batch(size) as batch,
            wrapped_apply(custom, lambda node, apply: _with_loop_fallback(node, apply, batch)),
        ):
            grads = tuple(None if g is None else batch.hide(g) for g in call.grads)
            found = run(replace(call, grads=grads))
            return tuple(None if g is None else batch.restore(g) for g in found)
    except BackwardError:
        raise  # an error of the graph or the arguments, which a loop would raise as well
    except (RuntimeError, IndexError) as error:
        if not _is_caused_by_batch(error):
            raise
        return _loop_after(error, call, size)


def _is_caused_by_batch(error: BaseException) -> bool:
    """Return whether the error is caused by vectorisation, rather than raised by the user's own code.

    A second call would prove it, but a hook or a backward that raised must not be called again.
    """
    trace = innermost_frame(error)
    if trace is None or is_user_raise(error):
        return False
    module = module_of(trace)
    if module == ENGINE_MODULE or module.startswith("gradrein."):
        return not is_wrong_return_message(str(error))  # no Python code in between: one of torch's own nodes
    return is_batch_refused_message(str(error))


def _loop_after(error: Exception, call: EngineCall, size: int) -> tuple[Tensor | None, ...]:
    """Run the whole pass once per gradient, after torch could not vectorise one of its own nodes."""
    where = _failing_node(call, size)
    try:
        found = _run_looped(call, size)
    except GraphFreedError:
        raise BackwardError(
            f"{error}\ntorch could not vectorise {where}, and the graph up to it is already freed. "
            "Pass retain_graph=True to compute the gradients one by one."
        ) from error
    _warn(f"torch could not vectorise {where} ({error}); the whole backward ran once per gradient instead.")
    return found


def _failing_node(call: EngineCall, size: int) -> str:
    """Repeat the failing run and return the label of the node that fails."""
    nodes = graph.walk(call.outputs)
    started: list[Node] = []
    finished: list[Node] = []
    handles = [node.register_prehook(lambda _, node=node: started.append(node)) for node in nodes]
    handles += [node.register_hook(lambda *_, node=node: finished.append(node)) for node in nodes]
    try:
        with open_batch(size) as batch:
            grads = tuple(None if g is None else batch.hide(g) for g in call.grads)
            run(replace(call, grads=grads, retain_graph=True))
    except GraphFreedError:
        started.clear()  # stopped before the failure: the first attempt freed that part of the graph
    except (RuntimeError, IndexError):
        pass
    finally:
        for handle in handles:
            handle.remove()
    if not started:
        return "a node of this graph"
    label = ErrorContext(call.outputs).node_label(started[-1])
    return f"a hook that runs after {label}" if started[-1] in finished else label


def _with_loop_fallback(node: Node, apply: Callable[..., Any], batch: BatchDim) -> Callable[..., Any]:
    """Return the node's own function, with a fallback to one call per gradient."""

    def call(*grads: Tensor | None) -> Any:
        try:
            return apply(*grads)
        except Exception as error:
            if not _is_caused_by_batch(error):
                raise
            batched = [None if g is None else batch.restore(g) for g in grads]
            with batch.paused():
                rows = [apply(*(None if g is None else g[i] for g in batched)) for i in range(batch.size)]
            _warn(f"torch could not vectorise {graph.op(node)}; that node ran once per gradient instead.")
            if isinstance(rows[0], tuple):
                return tuple(_stacked(column, batch) for column in zip(*rows, strict=True))
            return _stacked(rows, batch)

    return call


def _stacked(column: Sequence[Tensor | None], batch: BatchDim) -> Tensor | None:
    example = next((g for g in column if g is not None), None)
    if example is None:
        return None
    return batch.hide(torch.stack([torch.zeros_like(example) if g is None else g for g in column]))


def _warn(message: str) -> None:
    warnings.warn(f"gradrein.grad: {message}", GradreinWarning, stacklevel=2)


def _run_looped(call: EngineCall, size: int) -> tuple[Tensor | None, ...]:
    rows = []
    for index in range(size):
        one = replace(call, grads=tuple(None if g is None else g[index] for g in call.grads))
        rows.append(run(one if index == size - 1 else replace(one, retain_graph=True)))
    return tuple(None if row[0] is None else torch.stack(row) for row in zip(*rows, strict=True))
