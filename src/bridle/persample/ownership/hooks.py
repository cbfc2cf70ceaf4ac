"""Whether hooks may change gradients on their way through a graph.

torch has no call that lists the hooks of a tensor whose graph is at hand. It numbers all hooks that are registered from
Python, and all nodes of a thread: a graph that is younger than a moment since which no hook was registered has none.
A node does not tell its thread. One whose number this thread has not reached is known to come from another.
"""

import threading
from collections import deque

from ... import graph
from ..._torch import hooks as torch_hooks
from ..._torch.dtensor import is_crossing
from ..._torch.signature import Scan

_RECORDS = 16


class _Moments(threading.local):
    """Moments of this thread: the number of its next node, and how many hooks others had registered until then."""

    def __init__(self) -> None:
        self.known: deque[tuple[int, int]] = deque(
            [(graph.current_sequence_nr(), torch_hooks.hooks_registered())], _RECORDS
        )


_moments = _Moments()


def note_moment() -> None:
    """Remember how many hooks there have been until now, unless there was none since the last moment."""
    hooks = torch_hooks.hooks_registered()
    if hooks != _moments.known[-1][1]:
        _moments.known.append((graph.current_sequence_nr(), hooks))


def hooks_since(scan: Scan) -> int | None:
    """Return how many hooks were registered since the first op of the graph was recorded; None if unknown."""
    if scan.newest >= graph.current_sequence_nr():  # recorded in another thread, which counts for itself
        return None
    before = [hooks for number, hooks in _moments.known if number <= scan.oldest]
    latest = torch_hooks.hooks_registered() - before[-1] if before else None
    # The engine may not be asked about DTensors, so it is looked more closely: parallelize_module hooks modules.
    return latest - torch_hooks.module_hooks(latest) if latest and any(map(is_crossing, scan.custom)) else latest
