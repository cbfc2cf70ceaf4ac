"""Inner products between the gradients of two batches."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..representations.base import SampleGrads
from ..representations.numerics import as_rows, double, inner_products, is_moderate, upcast_half
from ..representations.outer import Outer
from ..representations.rows import Rows
from ..representations.sum import Sum


def cross_products(ours: Mapping[str, SampleGrads], theirs: Mapping[str, SampleGrads], out: Tensor) -> None:
    """Add the inner products of all pairs to `out`, (ours, theirs) in float64."""
    for name, form in ours.items():
        if name in theirs and out.numel():
            out += _cross(form, theirs[name]).to(out)


def _cross(a: SampleGrads, b: SampleGrads) -> Tensor:
    if isinstance(a, Sum) or isinstance(b, Sum):
        uses = [form.uses if isinstance(form, Sum) else (form,) for form in (a, b)]
        return torch.stack([_cross(x, y) for x in uses[0] for y in uses[1]]).sum(0)
    if isinstance(a, Outer) and isinstance(b, Outer) and _pairs_are_cheaper(a, b):
        return _of_pairs(a, b)
    if isinstance(a, Rows) or isinstance(b, Rows):
        a, b = _used_rows(a, b)
    blocks = []
    for part in a.chunks():
        left = as_rows(a.dense(part))
        blocks.append(torch.cat([inner_products(left, as_rows(b.dense(others)).to(left)) for others in b.chunks()], 1))
    return torch.cat(blocks)


def _pairs_are_cheaper(a: Outer, b: Outer) -> bool:
    """Compare products of all pairs of rows with writing the gradients down."""
    if a.left.is_complex() or b.left.is_complex():
        return False
    pairs = a.samples * b.samples * a.rows * b.rows * sum(a.shape)
    return pairs < (a.samples * a.rows + b.samples * b.rows + a.samples * b.samples) * a.shape[0] * a.shape[1]


def _of_pairs(a: Outer, b: Outer) -> Tensor:
    sides = []
    for x, y in ((a.left, b.left), (a.right, b.right)):
        x, y = upcast_half(x).flatten(0, 1), upcast_half(y).flatten(0, 1)
        x, y = (x, y) if is_moderate(x) and is_moderate(y) else (double(x), double(y))
        sides.append(x @ y.to(x).T)
    products = (sides[0] * sides[1]).view(a.samples, a.rows, b.samples, b.rows)
    return products.sum((1, 3), dtype=torch.float64)


def _used_rows(a: SampleGrads, b: SampleGrads) -> tuple[SampleGrads, SampleGrads]:
    """Leave out the rows of a table that one of the two does not touch."""
    tables = [form for form in (a, b) if isinstance(form, Rows)]
    if any(form.table != form.shape for form in tables) or not all(isinstance(x, Rows | Outer) for x in (a, b)):
        return a, b
    used = torch.unique(torch.cat([form.ids.reshape(-1) for form in tables]))
    made: list[SampleGrads] = []
    for form in (a, b):
        if isinstance(form, Rows):
            made.append(Rows(torch.searchsorted(used, form.ids), form.values, (len(used), form.shape[1])))
        elif isinstance(form, Outer):
            made.append(Outer(form.left[..., used], form.right))
    return made[0], made[1]
