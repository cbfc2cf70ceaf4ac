"""Whether hooks may change gradients on their way through a graph.

torch numbers all hooks that are registered from Python: where there has been none, no graph has one. Otherwise every
node is searched, at every step: hooks come and go while a graph stays of the same form.
"""

from ..._torch import fsdp
from ..._torch.hook_search import has_hooks
from ..._torch.hooks import hooks_registered
from ..._torch.signature import Scan


def is_hooked(scan: Scan, *, sharded: bool) -> bool:
    """Return whether there are hooks in a graph, other than on its leaves, which are not those of `fully_shard`."""
    if hooks_registered() == 0:
        return False
    nodes = [node for i, node in enumerate(scan.nodes) if i not in scan.leaves]
    if not sharded:
        return has_hooks(nodes)
    with fsdp.searched():
        return has_hooks(nodes, fsdp.is_own_hook)
