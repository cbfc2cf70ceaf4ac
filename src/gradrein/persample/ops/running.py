"""Where ops send elements by a saved index or mask: run the node itself and read where they went, or read the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import graph
from ..._torch.storage import is_fake
from .. import engine
from ..layout.owners import MIXED, UNREACHED, Owners

if TYPE_CHECKING:
    from .step import Step


def by_running(step: Step) -> Owners:
    """Run the node on ones and on each binary digit of the owners, in its own dtype: it only moves and adds.

    The owners that meet in an element are one and the same exactly when each digit is set in all of them or in none.
    """
    full = step.out.ids.expand(step.out.shape)
    count, several = _moved(step, full != UNREACHED), _moved(step, full == MIXED)
    if count is None or several is None or not full.numel():
        return step.mixed()
    exact = count.abs() * torch.finfo(graph.describe(step.node)[0].dtype).eps < 1
    one, owner = exact & (several == 0), torch.zeros_like(count, dtype=torch.int32)
    for digit in range(max(int(full.max()), 0).bit_length()):
        set_here = _moved(step, (full >= 0) & (full >> digit & 1 == 1))
        assert set_here is not None
        one &= (set_here == 0) | (set_here == count)
        owner |= (set_here == count).int() << digit
    return Owners.of(torch.where(count == 0, UNREACHED, torch.where(one, owner, MIXED)).to(torch.int32), step.shape)


def _moved(step: Step, here: Tensor) -> Tensor | None:
    """Return what the node makes of ones at some elements of its output; None if it sends no gradient."""
    kind = graph.describe(step.node)[0]
    found = engine.call(step.node, [here.to(kind.device, kind.dtype)])[step.position]
    if found is None:
        return None
    return (found.to_dense() if found.is_sparse else found).real.to("cpu", torch.float64)


def by_slices(step: Step) -> Owners:
    """Return the owners of an input of an op that moves whole slices along one dimension; run it in other forms."""
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
