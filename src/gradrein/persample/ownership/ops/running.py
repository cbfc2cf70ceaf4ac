"""Ops that only move and add: run the node itself and read where the elements went."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .... import graph
from ... import engine
from ..owners import NOBODY, SEVERAL, Owners

if TYPE_CHECKING:
    from .step import Step


def by_running(step: Step) -> Owners:
    """Run the node on ones and on each binary digit of the owners, in its own dtype: it only moves and adds.

    The owners that meet in an element are one and the same exactly when each digit is set in all of them or in none.
    """
    full = step.out.ids.expand(step.out.shape)
    count, several = _moved(step, full != NOBODY), _moved(step, full == SEVERAL)
    if count is None or several is None or not full.numel():
        return step.mixed()
    exact = count.abs() * torch.finfo(graph.describe(step.node)[0].dtype).eps < 1
    one, owner = exact & (several == 0), torch.zeros_like(count, dtype=torch.int32)
    for digit in range(max(int(full.max()), 0).bit_length()):
        set_here = _moved(step, (full >= 0) & (full >> digit & 1 == 1))
        assert set_here is not None
        one &= (set_here == 0) | (set_here == count)
        owner |= (set_here == count).int() << digit
    return Owners.of(torch.where(count == 0, NOBODY, torch.where(one, owner, SEVERAL)).to(torch.int32), step.shape)


def _moved(step: Step, here: Tensor) -> Tensor | None:
    """Return what the node makes of ones at some elements of its output; None if it sends no gradient."""
    kind = graph.describe(step.node)[0]
    found = engine.call(step.node, [here.to(kind.device, kind.dtype)])[step.position]
    if found is None:
        return None
    return (found.to_dense() if found.is_sparse else found).real.to("cpu", torch.float64)
