"""Where an exception came from: torch's own refusal, or a raise statement in somebody's code."""

import dis
from types import TracebackType


def innermost(error: BaseException) -> TracebackType | None:
    """Return the end of the traceback that is nearest to the cause."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def module_of(trace: TracebackType) -> str:
    """Return the name of the module whose code ran there."""
    return str(trace.tb_frame.f_globals.get("__name__"))


def is_raised_by_hand(error: BaseException) -> bool:
    """Tell whether a raise statement outside of torch raised it; what torch refuses comes out of a call."""
    trace = innermost(error)
    if trace is None or module_of(trace).partition(".")[0] == "torch":
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
