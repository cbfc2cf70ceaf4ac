"""Activation checkpointing, reentrant and not."""

from collections.abc import Generator
from contextlib import contextmanager

from torch.autograd.graph import Node
from torch.utils.checkpoint import GraphExecGroup

from .nodes import op

_REENTRANT = "CheckpointFunctionBackward"


def is_reentrant(node: Node) -> bool:
    """Return whether the node is a reentrant checkpoint: torch's own, or another library's of the same name."""
    return op(node) == _REENTRANT


@contextmanager
def recompute_once() -> Generator[None, None, None]:
    """Recompute each checkpointed region once, not for every value that is unpacked."""
    if GraphExecGroup._get_current_group() is not None:
        yield
        return
    with GraphExecGroup():
        yield
