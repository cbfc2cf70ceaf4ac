"""Methods that take turns, each in a process of its own.

What one library leaves behind (hooks that it registers, threads that spin, a heap in pieces) would slow down the others
in the same process. Here a process runs one method, and waits while the others have their turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from persample_methods import METHODS, NOT_CLIPPED, WRITE_ALL

# What written-down gradients may take, with the copies that clipping them makes.
WRITTEN_AT_MOST = 8 << 30
# Threads of the process that had its turn before spin for a while before they sleep.
PAUSE = 0.005
# Other processes have filled the caches: a step that is shorter than this many seconds runs once untimed before.
SHORT = 0.1


class OverLimitError(BaseException):
    """The time limit is over. No library that is measured catches this."""


@contextlib.contextmanager
def limited(seconds):
    """Raise `OverLimitError` once so many seconds have passed; never for 0."""

    def stop(*_):
        raise OverLimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Contender:
    """One method on one problem, in its own process.

    Attributes:
        refused: why it cannot run; empty if it can.
        took: how many seconds it took to be ready.
        gradient: the clipped gradient it ends with, if it ends with one.
        info: what it says about how it runs.
    """

    def __init__(
        self, make: Callable[..., Any], size: tuple[int, ...], method: str, limit: float, threads: int
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, make, size, method, limit, threads), daemon=True)
        self._process.start()
        theirs.close()
        self.refused, self.took, self.gradient, self.info = self._answer()

    def step(self) -> tuple[float, float]:
        """Return the seconds that a step takes by the clock, and of processor time."""
        time.sleep(PAUSE)
        self._pipe.send("step")
        found: tuple[float, float] = self._pipe.recv()  # EOFError if the process is gone: no ratio without it
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            return "its process ended", 0.0, None, ""


def _serve(pipe: Any, make: Callable[..., Any], size: tuple[int, ...], method: str, limit: float, threads: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step, ready = _ready(make(*size), method, limit)
    pipe.send(ready)
    if step is None:
        return
    last = 0.0
    while pipe.recv() == "step":
        if last < SHORT:
            step()
        start, start_spent = time.perf_counter(), time.process_time()
        step()
        last = time.perf_counter() - start
        pipe.send((last, time.process_time() - start_spent))


def _ready(problem: Any, method: str, limit: float) -> tuple[Any, tuple[str, float, Any, str]]:
    """Return a warmed-up step, and what a contender is told of it."""
    written = 2 * len(problem.x) * sum(q.nbytes for q in problem.model.parameters())
    if method in WRITE_ALL and written > WRITTEN_AT_MOST:
        return None, (f"not run: would write down {written / 2**30:.0f} GiB of gradients", 0.0, None, "")
    start = time.perf_counter()
    try:
        with limited(limit):
            step = METHODS[method](problem)
            step()
            step()
    except OverLimitError:
        why = f"not ready after {limit:.0f} s"
    except ImportError as error:
        why = f"not installed: {error.name}"
    except Exception as error:
        traceback.print_exc()
        why = f"cannot: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    else:
        took = time.perf_counter() - start
        clipped = method not in NOT_CLIPPED
        gradient = [q.grad.detach().numpy() for q in problem.model.parameters()] if clipped else None
        return step, ("", took, gradient, getattr(step, "info", ""))
    return None, (why, 0.0, None, "")
