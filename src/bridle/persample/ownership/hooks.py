"""Whether hooks may change gradients on their way through a graph.

torch has no call that lists the hooks of a tensor whose graph is at hand. It numbers all hooks that are registered from
Python: where there has been none, no graph has one. Otherwise each node is asked for its own. Those of `fully_shard`
are counted instead: torch also numbers all nodes of a thread, so the hooks since a graph's first one are known.
"""

import threading
from collections import deque

from ... import graph
from ..._torch import hooks as torch_hooks
from ..._torch.dtensor import is_crossing
from ..._torch.hook_search import has_hooks
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


def hooks_of(scan: Scan, *, sharded: bool) -> int | None:
    """Return how many hooks there may be in a graph, but on its leaves; None if there are some, and not known how many.

    Args:
        scan: the graph.
        sharded: the hooks that `fully_shard` registers in every forward pass are among them. They communicate, so they
            are not run to find out: all that were registered since the first op was recorded are counted.
    """
    total = torch_hooks.hooks_registered()
    if not sharded or total == 0 or any(map(is_crossing, scan.custom)):  # the engine may not be asked about DTensors
        return None if total and _any_hook(scan) else 0
    if scan.newest >= graph.current_sequence_nr():  # recorded in another thread, which counts for itself
        return None
    before = [moment for moment in _moments.known if moment[0] <= scan.oldest]
    return total - before[-1][1] if before else None


def _any_hook(scan: Scan) -> bool:
    return has_hooks(node for i, node in enumerate(scan.nodes) if i not in scan.leaves)
