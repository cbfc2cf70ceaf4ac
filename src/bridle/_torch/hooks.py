"""Hooks on leaves and nodes, and how many were ever registered."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_own_hooks = 0


def has_node_hooks(node: Node) -> bool:
    """Return whether hooks were registered on the node itself."""
    global _own_hooks
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        _own_hooks += 1
        hooks: Any = handle.hooks_dict_ref()
        del hooks[handle.id]
        if hooks:
            return True
    return False


def _nothing(*_: Any) -> None:
    pass


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Generator[None, None, None]:
    """Take the hooks off leaf tensors while active, so that the engine does not run them."""
    taken = [(hooks, list(hooks.items())) for hooks in (leaf._backward_hooks for leaf in leaves) if hooks]
    try:
        for hooks, _ in taken:
            hooks.clear()
        yield
    finally:
        for hooks, before in taken:
            since = list(hooks.items())
            hooks.clear()
            hooks.update([*before, *since])


def register_prehooks(nodes: Iterable[Node], make: Callable[[Node], Callable[..., Any]]) -> list[RemovableHandle]:
    """Register hooks of our own on nodes, which `hooks_registered` does not count."""
    global _own_hooks
    handles = [node.register_prehook(make(node)) for node in nodes]
    _own_hooks += len(handles)
    return handles


def hooks_registered() -> int:
    """Return how many hooks were registered from Python so far, by others than this package."""
    return RemovableHandle.next_id - _own_hooks
