"""Run a script as `python script.py` would, in this process."""

import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import random
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import _events
from ..._torch import training
from ...errors import ArgumentError

_OWN_FILES = (str(Path(__file__).parents[1]), _events.__file__, training.__file__)
_kept_alive: list[types.ModuleType] = []


def check_script(path: str) -> None:
    """Refuse what cannot be run, before anything has begun.

    Raises:
        ArgumentError: (a ValueError) there is no such file, or it is a folder that is no program.
    """
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            inside = sorted(name for name in os.listdir(path) if name.endswith(".py"))
            name = f" Name the script in it, such as {os.path.join(path, inside[0])}." if inside else ""
            raise ArgumentError(f"can't run {path!r}: it is a folder without a __main__.py.{name}")
    elif not os.path.isfile(path):
        raise ArgumentError(f"can't open file {path!r}: there is no such file.")


def check_module(name: str) -> None:
    """Refuse a module whose package is nowhere, before anything has begun. Nothing is imported.

    Raises:
        ArgumentError: (a ValueError) there is no such module.
    """
    top = name.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) if top else None
    if here is None and (not top or importlib.util.find_spec(top) is None):
        raise ArgumentError(f"there is no module named {top!r}.")


def run_script(path: str, args: list[str]) -> None:
    """Run a file as `__main__`: its argv, its directory first on the path, its classes picklable.

    A folder is its `__main__.py`, and itself on the path.
    """
    is_folder = os.path.isdir(path)
    file = os.path.abspath(os.path.join(path, "__main__.py") if is_folder else path)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins, __cached__=None, __loader__=loader)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    _kept_alive.append(sys.modules["__main__"])  # a module without references is emptied
    sys.modules["__main__"] = main
    sys.argv = [path, *args]
    _replace_first_path(path if is_folder else os.path.dirname(os.path.realpath(path)))
    with _hide_own_frames():
        exec(compile(loader.get_data(file), file, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, args: list[str]) -> None:
    """Run a module as `python -m name` would."""
    sys.argv = [name, *args]
    _replace_first_path(os.getcwd())
    with _hide_own_frames():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def end_after(steps: int) -> None:
    """End the script, as `sys.exit()` would, once an optimizer has taken so many steps."""
    counts: dict[int, int] = {}

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] == steps:
            raise SystemExit(0)

    register_optimizer_step_post_hook(after_step)


def seed_all(seed: int) -> None:
    """Seed what scripts draw from; one that seeds by itself still does."""
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy").random.seed(seed)


def _replace_first_path(folder: str) -> None:
    """Put the folder that Python would search first in place of ours."""
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path[0] = folder


@contextlib.contextmanager
def _hide_own_frames() -> Iterator[None]:
    """Show an uncaught exception without our frames, then let it end the process as it would have."""
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        _strip(error, set())
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None  # shown; the rest (exit code, dying of a signal) is Python's
        raise


def _strip(error: BaseException, seen: set[int]) -> None:
    if id(error) in seen:
        return
    seen.add(id(error))
    frames = []
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            frames.append(trace)
        trace = trace.tb_next
    rebuilt: types.TracebackType | None = None
    for frame in reversed(frames):
        rebuilt = types.TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = rebuilt
    for other in (error.__cause__, error.__context__):
        if other is not None:
            _strip(other, seen)
