"""Run a script as `python script.py` would, in this process."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import types
from pathlib import Path

from ..errors import ArgumentError

__all__ = ["check_script", "run_module", "run_script"]

_ROOM = str(Path(__file__).parent)
_kept: list[types.ModuleType] = []


def check_script(path: str) -> None:
    """Refuse what is no file, before anything has begun.

    Raises:
        ArgumentError: there is no such file.
    """
    if not os.path.isfile(path):
        raise ArgumentError(f"can't open file {path!r}: there is no such file.")


def run_script(path: str, args: list[str]) -> None:
    """Run a file as `__main__`: its argv, its directory first on the path, its classes picklable."""
    file = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins, __cached__=None, __loader__=loader)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    _kept.append(sys.modules["__main__"])  # a module that nobody holds is emptied
    sys.modules["__main__"] = main
    sys.argv = [path, *args]
    _put_first(os.path.dirname(os.path.realpath(path)))
    with _tracebacks_of_the_script():
        exec(compile(loader.get_data(file), file, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, args: list[str]) -> None:
    """Run a module as `python -m name` would."""
    sys.argv = [name, *args]
    _put_first(os.getcwd())
    with _tracebacks_of_the_script():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _put_first(folder: str) -> None:
    """Where Python would look first, in place of where it looked first for us."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path[0] = folder


class _tracebacks_of_the_script:  # noqa: N801  # reads as a verb where it is used
    """Shows an uncaught exception without our frames, then lets it end the process as it would have."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        _strip(error, set())
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None  # shown; what is left to do (exit code, dying of a signal) is Python's


def _strip(error: BaseException, seen: set[int]) -> None:
    if id(error) in seen:
        return
    seen.add(id(error))
    frames = []
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_ROOM):
            frames.append(trace)
        trace = trace.tb_next
    rebuilt: types.TracebackType | None = None
    for found in reversed(frames):
        rebuilt = types.TracebackType(rebuilt, found.tb_frame, found.tb_lasti, found.tb_lineno)
    error.__traceback__ = rebuilt
    for other in (error.__cause__, error.__context__):
        if other is not None:
            _strip(other, seen)
