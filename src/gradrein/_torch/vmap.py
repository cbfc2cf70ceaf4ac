"""A batch of gradients in one engine run: torch's legacy vmap, and the errors it causes."""

import re
from collections.abc import Callable

from torch import Tensor
from torch._vmap_internals import _vmap

# Ops whose backward gives wrong numbers, without an error, when torch vectorises it.
WRONG_WHEN_VECTORISED = frozenset({"AsStridedScatterBackward0"})

# torch's texts for code that cannot run on a batched tensor.
_BATCH_REFUSED = re.compile(
    r"vmap|Batching rule|BatchedTensor|LegacyBatched|doesn't have storage|Could not run 'aten::|not have is_contiguous"
)


def is_batch_refused_message(text: str) -> bool:
    """Return whether torch's text says that the code cannot run on a batch."""
    return _BATCH_REFUSED.search(text) is not None


def vectorise(function: Callable[..., tuple[Tensor | None, ...]], *batched: Tensor) -> tuple[Tensor | None, ...]:
    """Call a function that does not see the first dimension of tensors; its results have it in front.

    `torch.func.vmap` would do the same, but it is silently wrong over the backward of `cdist`; this is the
    older machinery, which `torch.autograd.grad(is_grads_batched=True)` uses as well.
    """
    results: tuple[Tensor | None, ...] = _vmap(function, 0, 0, allow_none_pass_through=True)(*batched)
    return results
