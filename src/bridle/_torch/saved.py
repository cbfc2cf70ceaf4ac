"""Values that nodes saved for their backward, and the texts with which torch refuses to unpack them."""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from .nodes import is_custom

_STALE = re.compile(
    r"modified by an inplace operation: \[(?P<type>.*?)\],? .*?is at version (?P<found>\d+); "
    r"expected version (?P<expected>\d+)",
    re.DOTALL,
)


def saved_fields(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name of each saved value with torch's handle or handles (None for a plain value).

    Raises:
        RuntimeError: torch's own, when a custom Function's saved tensors are already freed.
    """
    if is_custom(node):
        yield "tensors", node._raw_saved_tensors  # type: ignore[attr-defined]
        return
    for attribute in dir(type(node)):
        if attribute.startswith("_saved_"):
            name = attribute.removeprefix("_saved_")
            yield name, getattr(node, f"_raw_saved_{name}", None)


def saved_value(node: Node, name: str) -> Any:
    """Unpack one saved value: runs unpack hooks and torch's version check."""
    if is_custom(node):
        return node.saved_tensors  # type: ignore[attr-defined]
    return getattr(node, f"_saved_{name}")


def is_packed_handle(handle: Any) -> bool:
    """Return, without unpacking, whether saved-tensor hooks (checkpoint, offload) packed the value."""
    return handle.unpack_hook is not None


def held_tensor(handle: Any) -> Tensor | None:
    """Return the tensor behind the handle as it is now, with no version check; None if freed or packed."""
    data = handle.data
    return data if isinstance(data, Tensor) else None


def is_freed_message(message: str) -> bool:
    """Return whether torch's text says that saved values are freed."""
    return "backward through the graph a second time" in message


def is_unowned_output_message(message: str) -> bool:
    """Return whether torch refused only because a node's own output was requested without the node.

    The value is there and unchanged: torch checks its version first.
    """
    return "saved tensor that has been detached in-place" in message


def stale_versions(message: str) -> tuple[int, int] | None:
    """Parse (expected, found) version out of torch's text about an in-place change; None for another text."""
    match = _STALE.search(message)
    return None if match is None else (int(match["expected"]), int(match["found"]))
