"""Activation checkpointing, reentrant and not."""

from collections.abc import Generator
from contextlib import contextmanager

from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from .nodes import op


def is_reentrant_checkpoint(node: Node) -> bool:
    """Return whether the node stands for a region under torch's reentrant checkpoint."""
    return getattr(node, "_forward_cls", None) is CheckpointFunction


def is_foreign_checkpoint(node: Node) -> bool:
    """Return whether a node of a custom Function is another library's checkpoint: by its name, and a region to run."""
    named = "checkpoint" in op(node).lower() and not is_reentrant_checkpoint(node)
    return named and any(callable(value) for value in vars(node).values())


def is_reentrant(node: Node) -> bool:
    """Return whether the node is a reentrant checkpoint: torch's own, or another library's of the same name."""
    return op(node) == "CheckpointFunctionBackward"


@contextmanager
def recompute_once() -> Generator[None, None, None]:
    """Recompute each checkpointed region once, not for every value that is unpacked.

    A torch without `GraphExecGroup` recomputes it for every value: slower, and as right.
    """
    group = getattr(checkpoint, "GraphExecGroup", None)
    if group is None or group._get_current_group() is not None:
        yield
        return
    with group():
        yield
