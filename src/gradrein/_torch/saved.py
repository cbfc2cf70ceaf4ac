"""Values that nodes saved for their backward, and the texts with which torch refuses to unpack them."""

import gc
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import SavedTensor
from torch.autograd.graph import Node

from .modes import unprofiled
from .nodes import is_custom

# Parts of torch's texts about a graph that was freed, and about a saved value that was changed.
FREED = "backward through the graph a second time"
CHANGED_IN_PLACE = "modified by an inplace operation"
_STALE = re.compile(
    r"modified by an inplace operation: \[(?P<type>.*?)\],? .*?is at version (?P<found>\d+); "
    r"expected version (?P<expected>\d+)",
    re.DOTALL,
)


def has_pack_hooks() -> bool:
    """Return whether values that ops save are packed by hooks (`torch.autograd.graph.saved_tensors_hooks`)."""
    if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return False
    try:  # torch refuses to disable hooks while there are any
        torch._C._autograd._saved_tensors_hooks_disable("")
    except RuntimeError:
        return True
    finally:
        torch._C._autograd._saved_tensors_hooks_enable()
    return False


def unpacked() -> AbstractContextManager[None]:
    """Let ops of our own save what they save as it is, while open: hooks that pack are about the model."""
    if not has_pack_hooks():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)


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
    return getattr(node, _attribute(node, name))


def _attribute(node: Node, name: str) -> str:
    return "saved_tensors" if is_custom(node) else f"_saved_{name}"


# Whether handles tell their hooks and give out what they hold; else only the node itself can be asked.
READS_HANDLES = all(hasattr(SavedTensor, name) for name in ("data", "unpack", "unpack_hook"))


def is_packed(node: Node, name: str, handles: Any) -> bool:
    """Return, without unpacking, whether saved-tensor hooks (checkpoint, offload) packed the value or values."""
    if not READS_HANDLES:
        return unprofiled(lambda: _runs_python(partial(getattr, node, _attribute(node, name))))
    if isinstance(handles, tuple | list):
        return any(handle.unpack_hook is not None for handle in handles)
    return handles.unpack_hook is not None


class NodeKind(NamedTuple):
    """What the nodes of one type have in common.

    Attributes:
        tensors: the names of torch's handles of the tensors that they save.
        values: the names of everything else that they save.
        is_leaf: whether they accumulate into a leaf's ``.grad``.
        is_custom: whether they were made by a Python `torch.autograd.Function`.
        is_generic: whether ops that torch has no type for share this one, and are told apart by name.
    """

    tensors: tuple[str, ...]
    values: tuple[str, ...]
    is_leaf: bool
    is_custom: bool
    is_generic: bool


# Types of Python Functions are not kept: a program may make any number of them.
KINDS: dict[type, NodeKind] = {}


def kind_of(node: Node) -> NodeKind:
    """Return what all nodes of this one's type have in common."""
    kind = type(node)
    known = KINDS.get(kind)
    if known is None:
        names = dir(kind)
        raw = tuple(name for name in names if name.startswith("_raw_saved_"))
        plain = tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in raw)
        is_custom = isinstance(node, torch._C._FunctionBase)
        name = kind.__name__
        known = NodeKind(raw, plain, name == "AccumulateGrad" and not is_custom, is_custom, name == "CppFunction")
        if not is_custom:
            KINDS[kind] = known
    return known


def packed_nodes(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes with saved-tensor hooks, such as those of a checkpoint, before something that they saved."""
    packed = set()
    for node in nodes:
        for name in kind_of(node).tensors:
            if is_packed(node, name[len("_raw_saved_") :], getattr(node, name)):
                packed.add(node)
                break
    return packed


class _PythonCalledError(BaseException):
    """A Python function was called, and has not begun to run."""


def _runs_python(read: partial[Any]) -> bool:
    """Return whether something calls a function that is written in Python, which is stopped before it begins.

    A hook written in C is not seen: it runs, and the value it returns is taken for the one that was saved.
    """
    steps = (partial(sys.setprofile, _stop), read, partial(sys.setprofile, None))
    # In one call from C, and with no collection in between: only the hook can run, no finalizer and no signal handler.
    collects = gc.isenabled()
    gc.disable()
    try:
        deque(map(partial.__call__, steps), maxlen=0)
    except _PythonCalledError:
        return True
    except RuntimeError:  # freed, or changed in place: whoever reads it is told
        return False
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return False


def _stop(frame: FrameType, event: str, argument: Any) -> None:  # noqa: ARG001  # a profiler's signature
    if event == "call":
        raise _PythonCalledError


def held_tensor(handle: Any) -> Tensor | None:
    """Return the tensor behind the handle as it is now, with no version check; None if freed, packed or not told."""
    data = handle.data if READS_HANDLES else None
    return data if isinstance(data, Tensor) else None


def is_unowned_output_message(message: str) -> bool:
    """Return whether torch refused only because a node's own output was requested without the node.

    The value is there and unchanged: torch checks its version first.
    """
    return "saved tensor that has been detached in-place" in message


def stale_versions(message: str) -> tuple[int, int] | None:
    """Parse (expected, found) version out of torch's text about an in-place change; None for another text."""
    match = _STALE.search(message)
    return None if match is None else (int(match["expected"]), int(match["found"]))
