"""A batch of gradients in one engine run: torch's legacy vmap, and the errors it causes."""

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

# Ops whose backward gives wrong numbers, without an error, when torch vectorises it.
WRONG_WHEN_VECTORISED = frozenset({"AsStridedScatterBackward0"})

# torch's texts for code that cannot run on a batched tensor.
_BATCH_REFUSED = re.compile(
    r"vmap|Batching rule|BatchedTensor|LegacyBatched|doesn't have storage|Could not run 'aten::|not have is_contiguous"
)


def is_batch_refused_message(text: str) -> bool:
    """Return whether torch's text says that the code cannot run on a batch."""
    return _BATCH_REFUSED.search(text) is not None


@contextmanager
def open_batch() -> Generator[int, None, None]:
    """While open, ops do not see the first dimension of tensors for which it was hidden; yield the level to hide it at.

    `torch.func.vmap` would do the same, but it is silently wrong over the backward of `cdist`; this is the
    older machinery, which `torch.autograd.grad(is_grads_batched=True)` uses as well.
    """
    try:
        yield torch._C._vmapmode_increment_nesting()
    finally:
        torch._C._vmapmode_decrement_nesting()


def hide_batch(tensor: Tensor, level: int) -> Tensor:
    """Hide the first dimension."""
    return torch._add_batch_dim(tensor, 0, level)


def restore_batch(tensor: Tensor, level: int, size: int) -> Tensor:
    """Put the dimension back in front; a tensor without it gets it by repetition."""
    return torch._remove_batch_dim(tensor, level, size, 0)
