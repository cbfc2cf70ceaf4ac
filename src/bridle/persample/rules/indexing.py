"""Values looked up by index, and values written to places: what each sample looked up is its own.

Which element of the value an element of the output came from is found by looking up the numbers of the elements.
"""

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..ownership.layout import Layout, NotSeparableError
from ..representations.base import Dense, Piece
from ..representations.numerics import wide
from ..representations.rows import Cells, Rows
from .context import Use


def index(use: Use) -> Piece:
    """``self[indices]``."""
    indices = use.saved("indices")
    first = indices[0]
    whole_rows = (
        first is not None
        and first.dtype not in (torch.bool, torch.uint8)
        and not any(i is not None for i in indices[1:])
    )
    return _looked_up(use, first if whole_rows else None, lambda cells: cells[_key(indices)])


def index_select(use: Use) -> Piece:
    """``self.index_select(dim, index)``."""
    dim, chosen = _torch.saved_number(use.node, "dim"), use.saved("index")
    whole_rows = len(use.shape) > 0 and dim % len(use.shape) == 0
    return _looked_up(use, chosen if whole_rows else None, lambda cells: cells.index_select(dim, chosen))


def gather(use: Use) -> Piece:
    """``self.gather(dim, index)``."""
    dim, chosen = _torch.saved_number(use.node, "dim"), use.saved("index")
    return _looked_up(use, None, lambda cells: cells.gather(dim, chosen))


def _looked_up(use: Use, rows: Tensor | None, look_up: Callable[[Tensor], Tensor]) -> Piece:
    """Hold whole rows of the first dimension where these were looked up by one owner each, else single cells."""
    g = wide(use.gradient)
    if rows is not None and g.numel():
        height, width = use.shape[0], prod(use.shape[1:])
        ids = rows.reshape(-1, 1).long() % height
        with suppress(NotSeparableError):
            found = use.layout.by_sample(ids, width).squeeze(2)
            values = use.layout.by_sample(g.reshape(len(ids), width), width)
            return Cells(Rows(found, values, (height, width)), use.shape)
    cells = look_up(torch.arange(prod(use.shape), device=g.device).view(use.shape)).reshape(-1, 1)
    ids = use.layout.by_sample(cells, 1).squeeze(2)
    values = use.layout.by_sample(g.reshape(-1, 1), 1)
    return Cells(Rows(ids, values, (prod(use.shape), 1)), use.shape)


def index_put(use: Use) -> Piece:
    """``self.index_put(indices, values)``: what is left of self, and what was put."""
    key, g = _key(use.saved("indices")), wide(use.gradient)
    if use.position == 0:
        kept = g if use.saved("accumulate") else g.clone()
        if kept is not g:
            kept[key] = 0
        return Dense(use.layout.sums(kept, use.shape))
    owners = use.layout.owner_of_each(g.numel(), g.device).view(g.shape)[key]
    layout = Layout(use.samples, None, owners.reshape(-1))
    return Dense(layout.sums(g[key], use.shape))


def _key(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)
