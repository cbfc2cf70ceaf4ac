"""Child processes of tests: each has a time limit, and is killed and named when it exceeds it."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import pytest

LIMIT = 240  # seconds, less than a test has; only ever reached by a process that hangs

# A shell makes its background jobs, and so their children, ignore SIGINT, and Python then never raises
# KeyboardInterrupt. The default is put back in the child, not in the tests' own process.
_RESTORE = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def start(command, **options):
    """Start a process in a session of its own, with SIGINT as in a foreground job."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    restored = [sys.executable, "-c", _RESTORE, *map(str, command)]
    return subprocess.Popen(restored, env=env, start_new_session=True, **{**pipes, **options})


def run_process(command, text=None, limit=LIMIT, **options):
    """Run a process to its end."""
    child = start(command, **({} if text is None else {"stdin": subprocess.PIPE}), **options)
    with killed_after(limit, child):
        out, err = child.communicate(text)
    return subprocess.CompletedProcess(command, child.returncode, out, err)


@contextmanager
def killed_after(limit, child):
    """Kill the process with its children, and fail by its name, when the block takes longer."""
    expired = []
    timer = threading.Timer(limit, lambda: (expired.append(limit), kill(child)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        kill(child)
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        if expired:
            pytest.fail(f"after {limit} s this was still running, and was killed: {child.args[3:]}")


def kill(child):
    """Kill a process and its children, if they are still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
