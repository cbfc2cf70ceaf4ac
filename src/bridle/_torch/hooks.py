"""Hooks on leaves and nodes, and how many were ever registered."""

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_own_hooks = 0


Hook: TypeAlias = Callable[[Tensor], Tensor | None]


def leaf_hooks(leaves: Mapping[str, Tensor]) -> dict[str, list[Hook]]:
    """Return the hooks that were registered on leaf tensors, of those that have any."""
    return {name: list(leaf._backward_hooks.values()) for name, leaf in leaves.items() if leaf._backward_hooks}


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


_OF_MODULES = (
    *("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def next_number() -> int:
    """Return the number of the next hook of any kind."""
    return RemovableHandle.next_id


def module_hooks(first: int) -> int:
    """Return how many hooks from this number on are those of modules that run with forward: they change no gradient.

    Looks at every object there is: a tenth of a second.
    """
    modules = [vars(thing) for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    return len({number for has in modules for name in _OF_MODULES for number in has.get(name, ()) if number >= first})


def hooks_registered() -> int:
    """Return how many hooks were registered from Python so far, by others than this package."""
    return RemovableHandle.next_id - _own_hooks
