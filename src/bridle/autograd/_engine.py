"""One run of torch's engine, and what is told when it fails."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import BackwardError
from ..graph import current_sequence_nr
from . import _torch, _why_freed, _why_mismatched, _why_no_graph, _why_stale, _why_unused
from ._raised import is_raised_by_hand
from ._run import Inputs, Output, Run

# What each post-mortem answers to: a piece of torch's text, and the function that looks for the cause.
_PostMortem: TypeAlias = Callable[[str, Run], BackwardError]
_POST_MORTEMS: dict[str, _PostMortem] = {
    "appears to not have been used in the graph": _why_unused.explain,
    "One of the differentiated Tensors does not require grad": _why_unused.explain,
    "can't retain_grad on Tensor that has requires_grad=False": _why_unused.explain,
    "backward through the graph a second time": _why_freed.explain,
    "modified by an inplace operation": _why_stale.explain,
    "does not require grad and does not have a grad_fn": _why_no_graph.explain,
    "invalid gradient at index": _why_mismatched.explain,
}
_ABOUT_THE_GRAPH = (_why_freed.explain, _why_stale.explain)


class _Thread(threading.local):
    # The number torch would have given to a new node when this thread last ran a backward that frees.
    freed_before: int | None = None


_this_thread = _Thread()


def run(what: Run) -> tuple[Tensor | None, ...]:
    """Run torch's engine once.

    The happy path adds one number to what torch does: without it nobody could say afterwards which part of a
    graph an earlier pass has freed.
    """
    freed_before = _this_thread.freed_before
    if not what.retain_graph and not torch.compiler.is_compiling():  # the compiler cannot trace the number
        _this_thread.freed_before = current_sequence_nr()
    try:
        return _torch.run_engine(
            what.outputs,
            what.grads,
            what.retain_graph,
            what.create_graph,
            what.inputs.values,
            allow_unreachable=what.accumulate or what.allow_unused,
            accumulate=what.accumulate,
        )
    except RuntimeError as error:
        _raise_explained(error, replace(what, freed_before=freed_before))
        raise


def overriding(outputs: tuple[Output, ...], inputs: Inputs) -> tuple[Any, ...]:
    """Return the tensors among these if one of them is of a type that wants to see the call, else nothing.

    A mode alone, such as a default device, is no reason: then ours runs, and the mode sees what it does.
    """
    tensors = tuple(t for t in (*outputs, *inputs.values) if _torch.is_tensor_like(t))
    if has_torch_function(tensors) and any(_torch.overrides_functions(type(t)) for t in tensors):
        return tensors
    return ()


def hand_over(function: Callable[..., Any], tensors: tuple[Any, ...], what: Run, *args: Any, **kwargs: Any) -> Any:
    """Let tensor subclasses have the call; they are shown torch's own function, the one they know."""
    try:
        return handle_torch_function(function, tensors, *args, **kwargs)
    except RuntimeError as error:
        _raise_explained(error, what)
        raise


def _raise_explained(error: RuntimeError, what: Run) -> None:
    """Raise the error that tells the cause of this one, if it is one we know."""
    explained = _post_mortem(error, what)
    try:
        if explained is not None:
            raise explained from error
    finally:
        # This frame is in the traceback of what it raises. Without these names there is no circle, and the graph goes
        # with the error instead of waiting for the collector.
        del explained, error


def _post_mortem(error: RuntimeError, what: Run) -> BackwardError | None:
    """Return the error that tells the cause, or None if this is not one of the errors we know."""
    text = str(error)
    explain = next((explain for piece, explain in _POST_MORTEMS.items() if piece in text), None)
    if explain is None or not _is_of_this_run(error, explain):
        return None
    try:
        with _torch.unseen_by_overrides():
            return explain(text, what)
    except Exception:
        return None  # whatever goes wrong while looking for the cause must not hide torch's own error


def _is_of_this_run(error: RuntimeError, explain: _PostMortem) -> bool:
    """Tell torch's own error about this run from one that a hook or a backward of somebody's raised."""
    if type(error) is not RuntimeError or is_raised_by_hand(error):
        return False
    # A run inside this one has its own inputs and outputs; what is wrong with the graph may be seen from here.
    return explain in _ABOUT_THE_GRAPH or _torch.engine_runs(error) <= 1
