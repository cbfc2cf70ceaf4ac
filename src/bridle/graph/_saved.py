"""What a node saved for its backward, read without ever running a hook or raising by surprise."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from . import _torch


class State(Enum):
    """Whether a saved value can still be used."""

    READY = "ready"
    FREED = "freed"
    STALE = "stale"
    PACKED = "packed"


@dataclass(frozen=True, eq=False)
class Saved:
    """One value that a node saved.

    Attributes:
        name: torch's name for it, such as ``mat1`` or ``self``; custom Functions have ``tensors[0]`` and so
            on.
        state: whether it is ready, freed by a backward pass, changed in place since (stale), or packed by
            saved-tensor hooks such as those of checkpointing and offloading.
        value: the value when it is ready, else None.
        held: the tensor behind a stale value, as it is now.
        versions: (expected, found) version of a stale value.
    """

    name: str
    state: State
    value: Any = None
    held: Tensor | None = None
    versions: tuple[int, int] | None = None


def saved(node: Node, *, unpack: bool = False) -> tuple[Saved, ...]:
    """Return everything the node saved, with the state each value is in.

    Args:
        node: a node of the recorded graph.
        unpack: also unpack what saved-tensor hooks have packed. That runs the hooks: for a checkpoint, it
            computes the region again.

    Returns:
        One entry per saved value; empty for nodes that save nothing.

    Example:
        >>> import torch
        >>> from bridle import graph
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = x.square()
        >>> [(entry.name, entry.state.value) for entry in graph.saved(y.grad_fn)]
        [('exponent', 'ready'), ('self', 'ready')]
        >>> y.sum().backward()
        >>> [(entry.name, entry.state.value) for entry in graph.saved(y.grad_fn)]
        [('exponent', 'ready'), ('self', 'freed')]
    """
    try:
        fields = list(_torch.saved_fields(node))
    except RuntimeError as error:
        if not _torch.is_freed_message(str(error)):
            raise
        return (Saved("tensors", State.FREED),)
    return tuple(entry for name, handles in fields for entry in _entries(node, name, handles, unpack))


def _entries(node: Node, name: str, handles: Any, unpack: bool) -> list[Saved]:
    if handles is None:
        return [Saved(name, State.READY, _torch.saved_value(node, name))]
    many = isinstance(handles, tuple | list)
    labels = [f"{name}[{i}]" for i in range(len(handles))] if many else [name]
    handles = handles if many else [handles]
    if any(_torch.is_packed(handle) for handle in handles) and not unpack:
        return [Saved(label, State.PACKED) for label in labels]
    try:
        value = _torch.saved_value(node, name)
    except RuntimeError as error:
        if not many:
            spoiled = _spoiled(name, handles[0], str(error))
            if spoiled is None:
                raise
            return [spoiled]
        return [_read_alone(label, handle) for label, handle in zip(labels, handles, strict=True)]
    values = value if many else [value]
    return [Saved(label, State.READY, v) for label, v in zip(labels, values, strict=True)]


def _read_alone(label: str, handle: Any) -> Saved:
    """Read one of several values saved together, when reading them together has failed."""
    try:
        return Saved(label, State.READY, handle.unpack())
    except RuntimeError as error:
        spoiled = _spoiled(label, handle, str(error))
        if spoiled is None:
            raise
        return spoiled


def _spoiled(label: str, handle: Any, text: str) -> Saved | None:
    """Say why torch refused to unpack a value; None if its text is not one we know."""
    if _torch.is_freed_message(text):
        return Saved(label, State.FREED)
    if _torch.is_unowned_output_message(text):
        return Saved(label, State.READY, _torch.held_tensor(handle))
    versions = _torch.stale_versions(text)
    if versions is None:
        return None
    return Saved(label, State.STALE, held=_torch.held_tensor(handle), versions=versions)
