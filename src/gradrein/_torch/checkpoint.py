"""Activation checkpointing, reentrant and not."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from ..errors import UnsupportedOperationError
from .nodes import op


@contextmanager
def override_backward(node: Node, backward: Callable[..., tuple[Tensor | None, ...]]) -> Generator[None, None, None]:
    """While active, let the engine call `backward` when it comes to this node of a custom Function."""
    held = vars(node)
    before = held.get("apply")
    held["apply"] = backward
    try:
        yield
    finally:
        del held["apply"]
        if before is not None:
            held["apply"] = before


def is_reentrant_checkpoint(node: Node) -> bool:
    """Return whether the node stands for a region under torch's reentrant checkpoint."""
    return getattr(node, "_forward_cls", None) is CheckpointFunction


def is_foreign_checkpoint(node: Node) -> bool:
    """Return whether a node of a custom Function is another library's checkpoint: by its name, and a region to run."""
    named = "checkpoint" in op(node).lower() and not is_reentrant_checkpoint(node)
    return named and any(callable(value) for value in vars(node).values())


class _HasRunError(Exception):
    """The region of a checkpoint has been run, and torch's code may stop there."""


def run_checkpoint(node: Any) -> tuple[list[Tensor | None], tuple[Tensor | None, ...]]:
    """Run the region of a reentrant checkpoint again, with its random numbers and its autocast.

    torch's own backward does it, up to the point where the region has been run.

    Returns:
        What the region was given and what it returned, each with its history, so that the gradient can go
        on; None for everything that needs no gradient.
    """
    saved = node.saved_tensors
    run_function, versions = node.run_function, [x._version for x in saved]
    inputs: list[Tensor | None] = []
    outputs: list[Any] = []

    def run(*cut_off: Any) -> None:
        rest = iter(saved)
        given = [next(rest) if isinstance(x, Tensor) else None for x in cut_off]
        inputs.extend(x.view_as(x) if x is not None and x.requires_grad else None for x in given)
        found = run_function(*(old if new is None else new for old, new in zip(cut_off, inputs, strict=True)))
        outputs.extend(found if isinstance(found, tuple | list) else (found,))
        raise _HasRunError

    node.run_function = run
    try:
        CheckpointFunction.backward(node)  # type: ignore[no-untyped-call]
    except _HasRunError:
        pass
    finally:
        node.run_function = run_function
    if versions != [x._version for x in saved]:
        raise UnsupportedOperationError(
            "per_sample: a region under a reentrant checkpoint changes its inputs in place, so it cannot be "
            "recomputed. Let it work on a copy.",
            op(node),
        )
    return inputs, tuple(x if isinstance(x, Tensor) and x.requires_grad else None for x in outputs)


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
