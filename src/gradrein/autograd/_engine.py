"""One run of torch's engine; torch's errors are replaced by a diagnosis of their cause."""

import dis
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function, has_torch_function

from .._torch.engine import nested_engine_runs, run_engine
from .._torch.modes import is_tensor_like, overrides_functions, without_overrides
from .._torch.saved import CHANGED_IN_PLACE, FREED
from ..errors import BackwardError, GraphFreedError, InplaceModifiedError
from ..graph import current_sequence_nr
from ._diagnosis import freed_graph, inplace, no_graph, unused_input
from ._engine_call import EngineCall, Output

_Diagnosis: TypeAlias = Callable[[str, EngineCall], BackwardError]
# A part of torch's error text, and the function that finds the cause.
_DIAGNOSES: dict[str, _Diagnosis] = {
    "appears to not have been used in the graph": unused_input.diagnose,
    "One of the differentiated Tensors does not require grad": unused_input.diagnose,
    "can't retain_grad on Tensor that has requires_grad=False": unused_input.diagnose,
    FREED: freed_graph.diagnose,
    CHANGED_IN_PLACE: inplace.diagnose,
    "does not require grad and does not have a grad_fn": no_graph.diagnose,
}

# `freed_before`: the sequence number of the next node when this thread last started a pass that frees its graph.
_thread = threading.local()


def run(call: EngineCall) -> tuple[Tensor | None, ...]:
    """Run torch's engine once.

    The only cost over torch is one stored number, from which a later error finds out which part of a graph
    an earlier pass has freed.
    """
    freed_before: int | None = getattr(_thread, "freed_before", None)
    if not call.retain_graph and not torch.compiler.is_compiling():  # the compiler cannot trace the number
        _thread.freed_before = current_sequence_nr()
    try:
        return run_engine(
            call.outputs,
            call.grads,
            call.retain_graph,
            call.create_graph,
            call.inputs,
            allow_unreachable=call.accumulate or call.allow_unused,
            accumulate=call.accumulate,
        )
    except RuntimeError as error:
        _raise_diagnosed(error, replace(call, freed_before=freed_before))
        raise


def overriding_tensors(given: tuple[Output, ...]) -> tuple[Any, ...]:
    """Return the tensors among these if the type of one of them overrides torch's functions, else nothing.

    A mode alone, such as a default device, does not count: our function then runs, and the mode sees what it
    does.
    """
    tensors = tuple(t for t in given if is_tensor_like(t))
    if has_torch_function(tensors) and any(overrides_functions(type(t)) for t in tensors):
        return tensors
    return ()


def dispatch_override(
    function: Callable[..., Any], tensors: tuple[Any, ...], call: EngineCall, *args: Any, **kwargs: Any
) -> Any:
    """Pass the call to the tensor subclasses, as a call of torch's own function."""
    try:
        return handle_torch_function(function, tensors, *args, **kwargs)
    except RuntimeError as error:
        _raise_diagnosed(error, call)
        raise


def explain_saved(error: RuntimeError, edge: GradientEdge, advice: str) -> BackwardError | None:
    """Return the error about saved values that were freed or changed in place; None if torch's is about something else.

    Args:
        error: torch's.
        edge: The op that saved the values; which graph leads to it is not known.
        advice: What the caller can do about it, put below the cause.
    """
    text = str(error)
    if FREED not in text and CHANGED_IN_PLACE not in text:
        return None
    call = EngineCall((edge,), ())
    explained = _diagnose(text, call) or (GraphFreedError if FREED in text else InplaceModifiedError)(text)
    explained.args = (f"{explained}\n{advice}",)
    return explained


def _raise_diagnosed(error: RuntimeError, call: EngineCall) -> None:
    """Raise the error that names the cause of this one, if it is a known one."""
    diagnosed = _diagnose(str(error), call) if _is_about_this_run(error) else None
    try:
        if diagnosed is not None:
            raise diagnosed from error
    finally:
        # This frame is in the traceback of what it raises. Without these names there is no reference cycle, and the
        # graph is freed with the error instead of waiting for the garbage collector.
        del diagnosed, error


def _diagnose(text: str, call: EngineCall) -> BackwardError | None:
    """Return the error that names the cause, or None if torch's text is not a known one."""
    diagnose = next((diagnose for part, diagnose in _DIAGNOSES.items() if part in text), None)
    if diagnose is None:
        return None
    try:
        with without_overrides():
            return diagnose(text, call)
    except Exception:
        return None  # a failed diagnosis must not hide torch's own error


def _is_about_this_run(error: RuntimeError) -> bool:
    """Return whether this is torch's error about this run: not a user's hook's, nor of a run inside a node."""
    return type(error) is RuntimeError and not is_user_raise(error) and nested_engine_runs(error) <= 1


def is_user_raise(error: BaseException) -> bool:
    """Return whether a raise statement outside torch raised it; torch's own errors come out of a call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == "torch":
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
