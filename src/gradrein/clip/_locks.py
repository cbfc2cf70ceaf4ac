"""One call at a time: two threads that clip the same gradients would both measure, and then both scale them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class _Threads:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.free = threading.Condition()
        self.busy: list[tuple[Tensor, ...]] = []  # the parameters of each call that is under way


_threads = _Threads()

if hasattr(os, "register_at_fork"):
    # A thread that held a lock does not exist in the child, and would never release it.
    os.register_at_fork(after_in_child=lambda: _threads.__init__())  # type: ignore[misc]


def one_at_a_time(across_ranks: Sequence[Tensor] | None) -> AbstractContextManager[Any]:
    """Wait until no other thread is clipping the same gradients.

    Args:
        across_ranks: The parameters, where the call waits for other ranks. Threads then wait only for calls on the same
            parameters: with one lock for all, each could wait for a rank that waits for the other. None: one lock.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    return _threads.lock if across_ranks is None else _claim(tuple(across_ranks))


@contextmanager
def _claim(mine: tuple[Tensor, ...]) -> Iterator[None]:
    with _threads.free:
        _threads.free.wait_for(lambda: not _threads.busy or _is_free(mine))
        _threads.busy.append(mine)
    try:
        yield
    finally:
        with _threads.free:
            _threads.busy = [each for each in _threads.busy if each is not mine]
            _threads.free.notify_all()


def _is_free(parameters: Sequence[Tensor]) -> bool:
    wanted = set(map(id, parameters))
    return all(wanted.isdisjoint(map(id, each)) for each in _threads.busy)
