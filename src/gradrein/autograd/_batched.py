"""A batch of gradients of the same outputs, vectorised by torch."""

from dataclasses import replace

from torch import Tensor

from .. import graph
from .._torch.vmap import WRONG_WHEN_VECTORISED, is_batch_refused_message, vectorise
from ..errors import BackwardError
from ._engine import is_user_raise, run
from ._engine_call import EngineCall

_ADVICE = (
    "Call grad once per gradient instead, with retain_graph=True for all but the last, and stack the results; or give "
    "a custom Function a backward of torch ops only."
)


def run_batched(call: EngineCall) -> tuple[Tensor | None, ...]:
    """Run the engine for a batch of gradients: the first dimension of every gradient in the call, and of the results.

    Raises:
        BackwardError: torch cannot vectorise the pass, or does it wrongly.
    """
    wrong = {type(node).__name__ for node in graph.walk(call.outputs)} & WRONG_WHEN_VECTORISED
    if wrong:
        raise BackwardError(f"grad: torch vectorises {', '.join(sorted(wrong))} wrongly, without an error.\n{_ADVICE}")

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
