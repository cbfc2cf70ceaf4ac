"""Ops that move whole slices along one dimension to where a saved index says: read the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...._torch.storage import is_fake
from ... import engine
from ..owners import Owners
from .running import by_running

if TYPE_CHECKING:
    from .step import Step


SLICES = frozenset({"Index", "IndexAdd", "IndexSelect"})
"""Ops that move slices, in the forms that `by_slices` reads; it runs them in all others."""


def by_slices(step: Step) -> Owners:
    """Return the owners of an input of one of these ops."""
    adds = hasattr(step.node, "_saved_alpha")  # to an input, at the index: `index_add`
    dim, index = _moved_slices(step, step.out.shape if adds else step.shape)
    if index is None:
        return by_running(step)
    if not adds:
        return step.out.collected(dim, index, step.shape)
    return step.out if step.position == 0 else step.out.picked(dim, index)


def _moved_slices(step: Step, whole: tuple[int, ...]) -> tuple[int, Tensor | None]:
    """Return the dimension and the index of the slices that an op moves; no index if it does anything else.

    Args:
        step: the op.
        whole: the shape of what the index counts in.
    """
    if hasattr(step.node, "_saved_dim"):
        dim, index = engine.saved_number(step.node, "dim"), engine.saved(step.node, "index")
    else:
        given = [(i, one) for i, one in enumerate(engine.saved(step.node, "indices")) if one is not None]
        dim, index = given[0] if len(given) == 1 else (0, None)
    if type(index) is not Tensor or is_fake(index) or index.dtype not in (torch.int64, torch.int32):
        return 0, None
    count = len(step.shape)
    if index.dim() != 1 or not count or len(step.out.shape) != count:
        return 0, None
    return dim % count, index.to("cpu", torch.int64) % max(1, whole[dim])
