"""Everything private in torch that the reader touches, checked on torch 2.13.0 and 2.15.0.

The rest of this room speaks to torch only through these functions, so a torch that changes underneath is a
change to one file.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ..errors import ArgumentError

# The largest number of a 64-bit counter: torch gives it to leaves, so that they run as soon as they can.
LEAF_SEQUENCE = 2**64 - 1

_STALE = re.compile(
    r"modified by an inplace operation: \[(?P<type>.*?)\],? .*?is at version (?P<found>\d+); "
    r"expected version (?P<expected>\d+)",
    re.DOTALL,
)


def op(node: Node) -> str:
    """Return what torch calls the node, without the namespace some names carry."""
    return node.name().rsplit("::", 1)[-1]


def is_leaf(node: Node) -> bool:
    """Tell whether the node is the end of the graph that writes a leaf's ``.grad``."""
    return type(node).__name__ == "AccumulateGrad"


def leaf_tensor(node: Node) -> Tensor:
    """Return the leaf that an ``AccumulateGrad`` node writes to."""
    variable: Tensor = node.variable  # type: ignore[attr-defined]
    return variable


def is_custom(node: Node) -> bool:
    """Tell whether the node was made by a Python `torch.autograd.Function`."""
    return isinstance(node, torch._C._FunctionBase)


def sequence_nr(node: Node) -> int:
    """Return the node's number in the thread that made it; leaves have `LEAF_SEQUENCE`."""
    return node._sequence_nr()


# The number that this thread's next node will get. Bound as it is, without a frame of ours for the compiler to trace.
current_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def output_metadata(node: Node) -> list[Any]:
    """Return torch's description of what the recorded op produced, one entry per output."""
    return list(node._input_metadata)


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of `tensor` arrives.

    Unlike torch's own function this also takes sparse and nested leaves, which cannot be viewed.
    """
    node = tensor.grad_fn
    if node is not None and not is_custom(node):
        return GradientEdge(node, tensor.output_nr)
    if not tensor.requires_grad:
        raise ArgumentError("a tensor that requires no gradient has no edge in the recorded graph.")
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        viewable = tensor.layout in (torch.strided, torch.jagged) and not _is_cpp_nested(tensor)
        alias = (tensor.view_as(tensor) if viewable else tensor.clone()).grad_fn
    assert alias is not None
    if node is None:
        accumulate = alias.next_functions[0][0]
        assert accumulate is not None
        return GradientEdge(accumulate, 0)
    # A Python node does not keep its own graph alive; the alias made above does.
    return GradientEdge(node, tensor.output_nr, ownership_token=alias)


def _is_cpp_nested(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout == torch.strided


def saved_fields(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield each thing the node saved: its name, and torch's handle or handles (None for a plain value).

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
    """Unpack one saved thing: runs the user's unpack hooks and torch's own version check."""
    if is_custom(node):
        return node.saved_tensors  # type: ignore[attr-defined]
    return getattr(node, f"_saved_{name}")


def is_packed(handle: Any) -> bool:
    """Tell, without unpacking, whether saved-tensor hooks (checkpoint, offload) stand before the value."""
    return handle.unpack_hook is not None


def held_tensor(handle: Any) -> Tensor | None:
    """Return the tensor behind the handle as it is now, with no version check; None if freed or packed."""
    data = handle.data
    return data if isinstance(data, Tensor) else None


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor this one is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base


def memory_of(tensor: Tensor) -> int | None:
    """Return where the tensor's storage begins, or None if it has none of its own.

    Two tensors with the same answer share memory: one is a view of the other, or was detached from it.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None  # a wrapper around other tensors, or around nothing
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if tensor.layout != torch.strided or tensor.is_nested:
                return None
            return tensor.untyped_storage().data_ptr() or None
        except Exception:  # any tensor alive is asked: wrappers without storage, subclasses half made or half gone
            return None


def is_freed_message(message: str) -> bool:
    """Tell whether torch's text says that saved values are gone."""
    return "backward through the graph a second time" in message


def is_unowned_output_message(message: str) -> bool:
    """Tell whether torch refused only because a node's own output was asked for without the node.

    The value is there and unchanged: torch checks its version first.
    """
    return "saved tensor that has been detached in-place" in message


def stale_versions(message: str) -> tuple[int, int] | None:
    """Read (expected, found) version out of torch's text about an in-place change; None for another text."""
    match = _STALE.search(message)
    return None if match is None else (int(match["expected"]), int(match["found"]))


# Ops whose result is the same values in another place, shape or dtype. A parameter seen through these is
# still that parameter; the first other op is the one that uses it. (Higher numbers are in-place variants.)
_RELAYOUT = re.compile(
    "(Alias|AsStrided|Chunk|Clone|Diagonal|Expand|Permute|ReshapeAlias|ReshapeCopy|Select|Slice|Split|SplitWithSizes"
    r"|Squeeze|T|ToCopy|Transpose|Unbind|Unfold|UnsafeSplit|UnsafeView|Unsqueeze|View)Backward\d(_copy)?"
)


def is_relayout(node: Node) -> bool:
    """Tell whether the op only moves, copies, cuts or casts values, as a view, slice, clone or cast does."""
    return _RELAYOUT.fullmatch(op(node)) is not None
