"""Many gradients of the same outputs in one run: vectorised where torch can, looped where it cannot."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from ..errors import BackwardError, BridleWarning, GraphFreedError, VectorizationError
from . import _torch
from ._engine import run
from ._raised import innermost, is_raised_by_hand, module_of
from ._run import Run
from ._words import Scene


def run_batched(what: Run, size: int, chunk_size: int | None) -> tuple[Tensor | None, ...]:
    """Run the engine for a batch of gradients, `chunk_size` of them at a time.

    Args:
        what: the run; the first dimension of every gradient in it is the batch.
        size: the size of that dimension.
        chunk_size: how many to vectorise at once; None for all.

    Returns:
        The gradients, each with the batch as its first dimension; None for unused inputs.
    """
    nodes = graph.reachable(what.outputs)
    wrong = {type(node).__name__ for node in nodes} & _torch.WRONG_WHEN_VECTORISED
    if wrong:
        ops = ", ".join(sorted(wrong))
        _warn(f"torch vectorises {ops} wrongly; the whole backward runs once per gradient instead.")
        return _run_looped(what, size)
    custom = [node for node in nodes if graph.is_custom(node)]
    step = chunk_size or size
    if step >= size:
        return _run_chunk(what, size, custom)
    results = []
    for start in range(0, size, step):
        part = replace(what, grads=tuple(None if g is None else g[start : start + step] for g in what.grads))
        last = start + step >= size
        chunk = part if last else replace(part, retain_graph=True)
        results.append(_run_chunk(chunk, min(step, size - start), custom))
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*results, strict=True))


def _run_chunk(what: Run, size: int, custom: list[Node]) -> tuple[Tensor | None, ...]:
    try:
        with (
            _torch.open_batch(size) as batch,
            _torch.replaced_apply(custom, lambda node, apply: _looping_where_needed(node, apply, batch)),
        ):
            grads = tuple(None if g is None else batch.hide(g) for g in what.grads)
            found = run(replace(what, grads=grads))
            return tuple(None if g is None else batch.show(g) for g in found)
    except BackwardError:
        raise  # something is wrong with the graph or the arguments, and a loop would find the same
    except (RuntimeError, IndexError) as error:
        if not _is_for_the_batch(error):
            raise
        return _loop_after(error, what, size)


def _is_for_the_batch(error: BaseException) -> bool:
    """Tell an error that is there because the run is vectorised from one that the user's own code raises.

    A second call could tell for certain, but a hook or a backward that raised must not be called again.
    """
    trace = innermost(error)
    if trace is None or is_raised_by_hand(error):
        return False
    module = module_of(trace)
    if module == _torch.ENGINE_MODULE or module.startswith("bridle."):
        return not _torch.blames_return(str(error))  # no Python in between: one of torch's own nodes
    return _torch.blames_batch(str(error))


def _loop_after(error: Exception, what: Run, size: int) -> tuple[Tensor | None, ...]:
    """Loop over the whole run, when torch could not vectorise one of its own nodes."""
    where = _where_it_fails(what, size)
    try:
        found = _run_looped(what, size)
    except GraphFreedError:
        raise VectorizationError(
            f"{error}\ntorch could not vectorise {where}, and the way to it is already freed. "
            "Pass retain_graph=True, and the gradients will be computed one by one."
        ) from error
    _warn(f"torch could not vectorise {where} ({error}); the whole backward ran once per gradient instead.")
    return found


def _where_it_fails(what: Run, size: int) -> str:
    """Run into the failure once more, watching which node it is."""
    nodes = graph.reachable(what.outputs)
    started: list[Node] = []
    finished: list[Node] = []
    handles = [node.register_prehook(lambda _, node=node: started.append(node)) for node in nodes]
    handles += [node.register_hook(lambda *_, node=node: finished.append(node)) for node in nodes]
    try:
        with _torch.open_batch(size) as batch:
            grads = tuple(None if g is None else batch.hide(g) for g in what.grads)
            run(replace(what, grads=grads, retain_graph=True))
    except GraphFreedError:
        started.clear()  # stopped short of the failure: the first attempt freed the way to it
    except (RuntimeError, IndexError):
        pass
    finally:
        for handle in handles:
            handle.remove()
    if not started:
        return "a node of this graph"
    told = Scene(what.outputs).tell(started[-1])
    return f"a hook that runs after {told}" if started[-1] in finished else told


def _looping_where_needed(node: Node, apply: Callable[..., Any], batch: _torch.Batch) -> Callable[..., Any]:
    """Return the node's own function, falling back to one call per gradient if it must."""

    def call(*grads: Tensor | None) -> Any:
        try:
            return apply(*grads)
        except Exception as error:
            if not _is_for_the_batch(error):
                raise
            shown = [None if g is None else batch.show(g) for g in grads]
            with batch.paused():
                rows = [apply(*(None if g is None else g[i] for g in shown)) for i in range(batch.size)]
            _warn(f"torch could not vectorise {graph.op(node)}; that node ran once per gradient instead.")
            if isinstance(rows[0], tuple):
                return tuple(_stacked(column, batch) for column in zip(*rows, strict=True))
            return _stacked(rows, batch)

    return call


def _stacked(column: Sequence[Tensor | None], batch: _torch.Batch) -> Tensor | None:
    model = next((g for g in column if g is not None), None)
    if model is None:
        return None
    return batch.hide(torch.stack([torch.zeros_like(model) if g is None else g for g in column]))


def _warn(message: str) -> None:
    warnings.warn(f"bridle.grad: {message}", BridleWarning, stacklevel=2)


def _run_looped(what: Run, size: int) -> tuple[Tensor | None, ...]:
    rows = []
    for index in range(size):
        one = replace(what, grads=tuple(None if g is None else g[index] for g in what.grads))
        rows.append(run(one if index == size - 1 else replace(one, retain_graph=True)))
    return tuple(None if row[0] is None else torch.stack(row) for row in zip(*rows, strict=True))
