"""One call at a time: two threads that clip the same gradients would both measure them, and then both scale them."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["turn"]

_locks: dict[int, threading.RLock] = {}

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # a thread that held one is not in the new process


def turn() -> AbstractContextManager[Any]:
    """Wait until no other thread of this rank is clipping.

    A lock for each rank rather than for the process: ranks that are threads of one process have to meet.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return _locks.setdefault(id(world), threading.RLock())
