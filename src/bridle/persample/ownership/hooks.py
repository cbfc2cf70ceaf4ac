"""Whether hooks may change gradients on their way through a graph.

torch has no call that lists the hooks of a tensor whose graph is at hand. It numbers all hooks that are registered from
Python, and all nodes of a thread: a graph that is younger than a moment since which no hook was registered has none.
A node does not tell its thread. One whose number this thread has not reached is known to come from another; any other
may, with a hook from before that moment. So where any hook was ever registered, each node is asked for its own.
"""

import threading
from collections import deque

from ... import graph
from ..._torch import hooks as torch_hooks
from ..._torch.dtensor import is_crossing
from ..._torch.signature import Scan

_RECORDS = 16


class _Moments(threading.local):
    """Moments of this thread: the number of its next node, and how many hooks others had registered."""

    def __init__(self) -> None:
        self.known: deque[tuple[int, int]] = deque([_moment()], _RECORDS)


def _moment() -> tuple[int, int]:
    return graph.current_sequence_nr(), torch_hooks.hooks_registered()


_moments = _Moments()


def note_moment() -> None:
    """Remember how many hooks there have been until now, unless there was none since the last moment."""
    hooks = torch_hooks.hooks_registered()
    if hooks != _moments.known[-1][1]:
        _moments.known.append(_moment())


def hooks_since(scan: Scan) -> int | None:
    """Return how many hooks were registered since the first op of the graph was recorded; None if unknown."""
    if scan.newest >= graph.current_sequence_nr():  # recorded in another thread, which counts for itself
        return None
    before = [moment for moment in _moments.known if moment[0] <= scan.oldest]
    if not before:
        return None
    total = torch_hooks.hooks_registered()
    since = total - before[-1][1]
    if since and any(map(is_crossing, scan.custom)) and not _any_hook(scan):
        return 0  # parallelize_module and optimizers register hooks too, and the engine may not be asked about DTensors
    return None if since == 0 and total and _any_hook(scan) else since


def _any_hook(scan: Scan) -> bool:
    return torch_hooks.may_have_hooks(node for i, node in enumerate(scan.nodes) if i not in scan.leaves)
