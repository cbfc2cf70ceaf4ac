"""Hooks on nodes, and how many of any kind were ever registered."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_own_hooks = 0
# While a hook of our own is registered and not yet counted, nobody is to count. A finalizer may come in between.
_counting = threading.RLock()


def has_node_hooks(node: Node) -> bool:
    """Return whether hooks were registered on the node itself."""
    global _own_hooks
    for register in (node.register_prehook, node.register_hook):
        with _counting:
            handle = register(_nothing)
            _own_hooks += 1
        hooks: Any = handle.hooks_dict_ref()
        del hooks[handle.id]
        if hooks:
            return True
    return False


def _nothing(*_: Any) -> None:
    pass


def register_prehooks(nodes: Iterable[Node], make: Callable[[Node], Callable[..., Any]]) -> list[RemovableHandle]:
    """Register hooks of our own on nodes, which `hooks_registered` does not count."""
    global _own_hooks
    with _counting:
        handles = [node.register_prehook(make(node)) for node in nodes]
        _own_hooks += len(handles)
    return handles


def hooks_registered() -> int:
    """Return how many hooks were registered from Python so far, by others than this package."""
    with _counting:
        return RemovableHandle.next_id - _own_hooks
