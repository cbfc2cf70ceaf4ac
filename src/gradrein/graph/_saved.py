"""Values a node saved for its backward, read without running hooks and without raising torch's errors."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from .._torch.saved import (
    FREED,
    READS_HANDLES,
    held_tensor,
    is_packed,
    is_unowned_output_message,
    saved_fields,
    saved_value,
    stale_versions,
)

# Whether a saved value can still be used.
SavedState: TypeAlias = Literal["ready", "freed", "stale", "packed"]


@dataclass(frozen=True, eq=False)
class SavedValue:
    """One value that a node saved.

    Attributes:
        name: torch's name for it, such as ``mat1`` or ``self``; custom Functions have ``tensors[0]`` and so
            on.
        state: whether it is ready, freed by a backward pass, changed in place since (stale), or packed by
            saved-tensor hooks such as those of checkpointing and offloading.
        value: the value if it is ready, else None.
        held: the tensor behind a stale value, as it is now.
        versions: (expected, found) version of a stale value.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> entry = gradrein.graph.saved(w.square().grad_fn)[-1]
        >>> entry.name, entry.value is w
        ('self', True)

    See Also:
        [`gradrein.graph.saved`][]
    """

    name: str
    state: SavedState
    value: Any = None
    held: Tensor | None = None
    versions: tuple[int, int] | None = None


def saved(node: Node, *, unpack: bool = False) -> tuple[SavedValue, ...]:
    """Return everything the node saved, and the state of each value.

    Args:
        node: a node of the recorded graph.
        unpack: also unpack what saved-tensor hooks have packed. This runs the hooks: for a checkpoint, it
            recomputes the region.

    Returns:
        One entry per saved value; empty for nodes that save nothing.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = x.square()
        >>> [(entry.name, entry.state) for entry in graph.saved(y.grad_fn)]
        [('exponent', 'ready'), ('self', 'ready')]
        >>> y.sum().backward()
        >>> [(entry.name, entry.state) for entry in graph.saved(y.grad_fn)]
        [('exponent', 'ready'), ('self', 'freed')]

    See Also:
        [`gradrein.graph.read`][], [`gradrein.errors.InplaceModifiedError`][]
    """
    try:
        fields = list(saved_fields(node))
    except RuntimeError as error:
        if FREED not in str(error):
            raise
        return (SavedValue("tensors", "freed"),)
    return tuple(entry for name, handles in fields for entry in _entries(node, name, handles, unpack))


def _entries(node: Node, name: str, handles: Any, unpack: bool) -> list[SavedValue]:
    if handles is None:
        return [SavedValue(name, "ready", saved_value(node, name))]
    many = isinstance(handles, tuple | list)
    names = [f"{name}[{i}]" for i in range(len(handles))] if many else [name]
    if not unpack and is_packed(node, name, handles):
        return [SavedValue(name, "packed") for name in names]
    try:
        value = saved_value(node, name)
    except RuntimeError as error:
        if not many or not READS_HANDLES:  # such a torch does not tell which one of several it refuses
            unavailable = _unavailable(name, handles, str(error))
            if unavailable is None:
                raise
            return [unavailable]
        return [_unpack_one(name, handle) for name, handle in zip(names, handles, strict=True)]
    values = value if many else [value]
    return [SavedValue(name, "ready", v) for name, v in zip(names, values, strict=True)]


def _unpack_one(name: str, handle: Any) -> SavedValue:
    """Unpack one of several values saved together, after unpacking all of them has failed."""
    try:
        return SavedValue(name, "ready", handle.unpack())
    except RuntimeError as error:
        unavailable = _unavailable(name, handle, str(error))
        if unavailable is None:
            raise
        return unavailable


def _unavailable(name: str, handle: Any, text: str) -> SavedValue | None:
    """Return the state of a value that torch refused to unpack; None for an unknown error text."""
    if FREED in text:
        return SavedValue(name, "freed")
    if is_unowned_output_message(text):
        return SavedValue(name, "ready", held_tensor(handle))
    versions = stale_versions(text)
    if versions is None:
        return None
    return SavedValue(name, "stale", held=held_tensor(handle), versions=versions)
