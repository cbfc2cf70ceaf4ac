"""A batch of gradients in one engine run: torch's legacy vmap, and the errors it causes."""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

# Ops whose backward gives wrong numbers, without an error, when torch vectorises it.
WRONG_WHEN_VECTORISED = frozenset({"AsStridedScatterBackward0"})

# torch's texts for code that cannot run on a batched tensor.
_BATCH_REFUSED = re.compile(
    r"vmap|Batching rule|BatchedTensor|LegacyBatched|doesn't have storage|Could not run 'aten::|not have is_contiguous"
)
# torch's texts for a custom Function or a hook with a wrong return value, batched or not.
_WRONG_RETURN = re.compile(
    "returned an incorrect number of|returned a gradient different|expected Variable|' has changed the |can't replace a"
    "|input_is_complex == grad_is_complex"
)


def is_batch_refused_message(text: str) -> bool:
    """Return whether torch's text says that the code cannot run on a batch."""
    return _BATCH_REFUSED.search(text) is not None


def is_wrong_return_message(text: str) -> bool:
    """Return whether torch's text is about what a custom Function or a hook returned."""
    return _WRONG_RETURN.search(text) is not None


class BatchDim:
    """The first dimension of some tensors, hidden from the ops that run while it is open.

    `torch.func.vmap` would do the same, but it is silently wrong over the backward of `cdist`; this is the
    older machinery, which `torch.autograd.grad(is_grads_batched=True)` uses as well.
    """

    def __init__(self, size: int, level: int) -> None:
        self.size = size
        self._level = level

    def hide(self, tensor: Tensor) -> Tensor:
        """Hide the first dimension."""
        return torch._add_batch_dim(tensor, 0, self._level)

    def restore(self, tensor: Tensor) -> Tensor:
        """Put the dimension back in front; a tensor without it gets it by repetition."""
        return torch._remove_batch_dim(tensor, self._level, self.size, 0)

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Let ops run as if no batch were open: random ones, for example, are refused inside."""
        torch._C._vmapmode_decrement_nesting()
        try:
            yield
        finally:
            torch._C._vmapmode_increment_nesting()


@contextmanager
def open_batch(size: int) -> Generator[BatchDim, None, None]:
    """Open a batch of the given size."""
    level = torch._C._vmapmode_increment_nesting()
    try:
        yield BatchDim(size, level)
    finally:
        torch._C._vmapmode_decrement_nesting()


@contextmanager
def wrapped_apply(
    nodes: Sequence[Node], wrap: Callable[[Node, Callable[..., Any]], Callable[..., Any]]
) -> Generator[None, None, None]:
    """Wrap, while open, what the engine calls on nodes made by a Python `torch.autograd.Function`."""
    try:
        for node in nodes:
            node.apply = wrap(node, node.apply)  # type: ignore[attr-defined]
        yield
    finally:
        for node in nodes:
            vars(node).pop("apply", None)
