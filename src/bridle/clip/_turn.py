"""One call at a time: two threads that clip the same gradients would both measure them, and then both scale them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["turn"]


class _Threads:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.free = threading.Condition()
        self.busy: set[int] = set()


_threads = _Threads()

if hasattr(os, "register_at_fork"):
    # A thread that held a lock is not in the new process, and would never give it back.
    os.register_at_fork(after_in_child=lambda: _threads.__init__())  # type: ignore[misc]


def turn(spread: Sequence[Tensor] | None) -> AbstractContextManager[Any]:
    """Wait until no other thread is clipping the same gradients.

    Args:
        spread: the parameters, where other ranks have to be waited for. Two threads may then be at work at once on
            different ones: each may wait for a rank that waits for the other. None: nobody is waited for, and one
            lock for all is enough.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    return _threads.lock if spread is None else _claim({id(p) for p in spread})


@contextmanager
def _claim(mine: set[int]) -> Iterator[None]:
    with _threads.free:
        _threads.free.wait_for(lambda: not _threads.busy & mine)
        _threads.busy |= mine
    try:
        yield
    finally:
        with _threads.free:
            _threads.busy -= mine
            _threads.free.notify_all()
