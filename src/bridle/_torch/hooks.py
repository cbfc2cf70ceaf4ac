"""Hooks on leaves and nodes, and how many were ever registered."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

_own_hooks = 0


Hook: TypeAlias = Callable[[Tensor], Tensor | None]


def leaf_hooks(leaves: Mapping[str, Tensor]) -> dict[str, list[Hook]]:
    """Return the hooks that were registered on leaf tensors, of those that have any."""
    return {name: list(leaf._backward_hooks.values()) for name, leaf in leaves.items() if leaf._backward_hooks}


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


class _Witness(Tensor):
    """A gradient that nobody may look at or change while it is sent: who tries gets an error. Later it is zeros."""

    is_sent = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, _Witness) and value.is_sent for value in tree_leaves((args, kwargs))):
            raise RuntimeError
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def may_have_hooks(nodes: Iterable[Node]) -> bool:
    """Return whether a hook on these nodes, or on the outputs of their ops, may change a gradient.

    torch cannot list the hooks of a tensor. A gradient is sent to each output and no further, and comes back as it was
    if no hook looked at it.
    """
    sent: dict[Any, _Witness] = {}
    try:
        return any(has_node_hooks(node) or _changes(node, sent) for node in nodes)
    finally:
        for witness in sent.values():  # a hook may have kept it
            witness.is_sent = False


def _changes(node: Node, sent: dict[Any, _Witness]) -> bool:
    engine = torch.autograd.Variable._execution_engine
    run = getattr(engine, "engine", engine).run_backward  # nobody who watches backward passes is to see this one
    for i, out in enumerate(node._input_metadata):
        edge, shape = GradientEdge(node, i), tuple(out.shape)
        key = (shape, out.dtype, out.device)
        try:
            if key not in sent:
                sent[key] = torch.zeros((), dtype=out.dtype, device=out.device).expand(shape).as_subclass(_Witness)
                sent[key].is_sent = True
            (found,) = run((edge,), (sent[key],), True, False, (edge,), allow_unreachable=True, accumulate_grad=False)
        except Exception:  # the witness's own, or a hook's: whatever it raises shows that there is one
            return True
        if found is not sent[key]:
            return True
    return False


def register_prehooks(nodes: Iterable[Node], make: Callable[[Node], Callable[..., Any]]) -> list[RemovableHandle]:
    """Register hooks of our own on nodes, which `hooks_registered` does not count."""
    global _own_hooks
    handles = [node.register_prehook(make(node)) for node in nodes]
    _own_hooks += len(handles)
    return handles


def hooks_registered() -> int:
    """Return how many hooks were registered from Python so far, by others than this package."""
    return RemovableHandle.next_id - _own_hooks
