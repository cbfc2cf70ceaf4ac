"""Python's profiler, of which every thread has at most one."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def unprofiled(call: Callable[[], T]) -> T:
    """Call where no profiler is at work, so that one can be set: in a new thread if there is one in this.

    A profiler that is written in C, such as `cProfile`, cannot be set again from Python once it was replaced.
    """
    if sys.getprofile() is None:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
