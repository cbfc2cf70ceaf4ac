"""Activation checkpointing, reentrant and not."""

from collections.abc import Generator
from contextlib import contextmanager

from torch.autograd.graph import Node
from torch.utils import checkpoint

from .nodes import op


def is_reentrant(node: Node) -> bool:
    """Return whether the node stands for a region under a reentrant checkpoint: torch's own, or another library's.

    It is known by its name, and by the region that it is to run.
    """
    return "checkpoint" in op(node).lower() and any(callable(value) for value in getattr(node, "__dict__", {}).values())


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
