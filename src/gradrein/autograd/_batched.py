"""A batch of gradients of the same outputs, vectorised by torch."""

from dataclasses import replace

import torch
from torch import Tensor

from .. import graph
from .._torch.vmap import WRONG_WHEN_VECTORISED, is_batch_refused_message, vectorise
from ..errors import BackwardError
from ._diagnosis.exception_source import is_user_raise
from ._engine import run
from ._engine_call import EngineCall

_ADVICE = (
    "Call grad once per gradient instead, with retain_graph=True for all but the last, and stack the results; or give "
    "a custom Function a backward of torch ops only."
)


def run_batched(call: EngineCall, size: int, chunk_size: int | None) -> tuple[Tensor | None, ...]:
    """Run the engine for a batch of gradients, `chunk_size` of them at a time.

    Args:
        call: the run; the first dimension of every gradient in it is the batch.
        size: the size of that dimension.
        chunk_size: how many to vectorise at once; None for all.

    Returns:
        The gradients, each with the batch as its first dimension; None for unused inputs.

    Raises:
        BackwardError: torch cannot vectorise the pass, or does it wrongly.
    """
    wrong = {type(node).__name__ for node in graph.walk(call.outputs)} & WRONG_WHEN_VECTORISED
    if wrong:
        raise BackwardError(f"grad: torch vectorises {', '.join(sorted(wrong))} wrongly, without an error.\n{_ADVICE}")
    step = chunk_size or size
    if step >= size:
        return _run_chunk(call)
    results = []
    for start in range(0, size, step):
        part = replace(call, grads=tuple(None if g is None else g[start : start + step] for g in call.grads))
        last = start + step >= size
        results.append(_run_chunk(part if last else replace(part, retain_graph=True)))
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*results, strict=True))


def _run_chunk(call: EngineCall) -> tuple[Tensor | None, ...]:
    def run_each(*grads: Tensor) -> tuple[Tensor | None, ...]:
        given = iter(grads)
        return run(replace(call, grads=tuple(None if g is None else next(given) for g in call.grads)))

    try:
        return vectorise(run_each, *(g for g in call.grads if g is not None))
    except BackwardError:
        raise  # an error of the graph or the arguments
    except RuntimeError as error:
        if is_user_raise(error) or not is_batch_refused_message(str(error)):
            raise
        raise BackwardError(
            f"{error}\ngrad: torch cannot vectorise this pass (is_grads_batched=True).\n{_ADVICE}"
        ) from error
