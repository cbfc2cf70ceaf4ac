"""The source of an exception: torch's own code, or a raise statement in a user's code."""

import dis
from types import TracebackType


def innermost_frame(error: BaseException) -> TracebackType | None:
    """Return the traceback entry in which the exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def module_of(trace: TracebackType) -> str:
    """Return the name of the module whose code ran there."""
    return str(trace.tb_frame.f_globals.get("__name__"))


def is_user_raise(error: BaseException) -> bool:
    """Return whether a raise statement outside torch raised it; torch's own errors come out of a call."""
    trace = innermost_frame(error)
    if trace is None or module_of(trace).partition(".")[0] == "torch":
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
