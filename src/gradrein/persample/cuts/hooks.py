"""Whether hooks may change gradients on their way through a graph.

torch numbers all hooks that are registered from Python, those of modules and optimizers included. Where there has been
none, or none is left on any tensor or node since the last one was registered, no graph has one. Otherwise every node is
searched, at every step: hooks come and go while a graph stays of the same form.
"""

from typing import NamedTuple

from ..._torch import fsdp
from ..._torch.hooks import has_hooks, hooks_registered
from ..._torch.live_hooks import may_be_hooks
from ..._torch.signature import Scan


class _Looked(NamedTuple):
    """What is known about the hooks of this process.

    Attributes:
        registered: how many there had been.
        searches: how many graphs were searched since.
        is_clear: whether none of them was left then.
    """

    registered: int = 0
    searches: int = 0
    is_clear: bool = True


# So many searches of graphs take as long as one look at the whole process.
_SEARCHES = 100
_looked = _Looked()


def is_hooked(scan: Scan, *, sharded: bool) -> bool:
    """Return whether there are hooks in a graph, other than on its leaves, which are not those of `fully_shard`."""
    if _is_clear():
        return False
    nodes = [node for i, node in enumerate(scan.nodes) if i not in scan.leaves]
    if not sharded:
        return has_hooks(nodes)
    with fsdp.searched():
        return has_hooks(nodes, fsdp.is_own_hook)


def _is_clear() -> bool:
    """Return whether no tensor and no node of this process has a hook, as far as that is known."""
    global _looked
    registered, found = hooks_registered(), _looked
    if registered != found.registered:
        _looked = found = _Looked(registered, 1, is_clear=False)
    elif not found.is_clear and found.searches <= _SEARCHES:
        is_clear = found.searches == _SEARCHES and not may_be_hooks() and hooks_registered() == registered
        _looked = found = _Looked(registered, found.searches + 1, is_clear)
    return found.is_clear
