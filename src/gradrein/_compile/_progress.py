"""A line about work that takes long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 1.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what is going on if it takes more than a second, and how long it took."""
    start = time.perf_counter()
    timer = threading.Timer(_PATIENCE, lambda: print(f"{what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        took = time.perf_counter() - start
        if took > _PATIENCE:
            print(f"{what}: {took:.1f} s", file=sys.stderr, flush=True)
