"""Hooks on leaves and nodes, and how many were ever registered."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_own_hooks = 0


def leaf_hooks(leaf: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the hooks that were registered on a leaf tensor."""
    return list((leaf._backward_hooks or {}).values())


def has_node_hooks(node: Node) -> bool:
    """Return whether hooks were registered on the node itself."""
    global _own_hooks
    handles = [node.register_prehook(_nothing), node.register_hook(_nothing)]
    _own_hooks += len(handles)
    for handle in handles:
        handle.remove()
    return any(handle.hooks_dict_ref() for handle in handles)


def _nothing(*_: Any) -> None:
    pass


def register_prehooks(nodes: Iterable[Node], make: Callable[[Node], Callable[..., Any]]) -> list[RemovableHandle]:
    """Register hooks of our own on nodes, which `hooks_registered` does not count."""
    global _own_hooks
    handles = [node.register_prehook(make(node)) for node in nodes]
    _own_hooks += len(handles)
    return handles


def hooks_registered() -> int:
    """Return how many hooks were registered from Python so far, by others than this package."""
    return RemovableHandle.next_id - _own_hooks
