"""Run a script as `python` would, in a fork of a process that has imported torch.

Importing torch, and what its optimizers import at their first step, takes most of the time of a short script. Tests about
a process as such (tracebacks, signals, terminals, workers, imports) start a real one: see `processes.py`.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback

import pytest

from .processes import LIMIT, kill

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo"])


def run_forked(folder, *args, env=None):
    """Run `python *args`, a script or `-m` a module, in a folder; return its exit code and what it wrote."""
    out, err = folder / ".stdout", folder / ".stderr"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = _CONTEXT.Process(target=_work, args=(folder, list(map(str, args)), environment, out, err))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        kill(process)
        pytest.fail(f"after {LIMIT} s this was still running, and was killed: {args}")
    texts = [file.read_text() for file in (out, err)]
    out.unlink()
    err.unlink()
    return subprocess.CompletedProcess(args, process.exitcode, *texts)


def _work(folder, args, environment, out, err):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    code = _exit_code(args)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code(args):
    """Run a script or a module as `__main__`; return the exit code that Python would have."""
    try:
        if args[0] == "-m":
            sys.argv, sys.path[0:0] = args[1:], [os.getcwd()]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0:0] = args, [os.path.dirname(os.path.abspath(args[0]))]
            runpy.run_path(os.path.abspath(args[0]), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
