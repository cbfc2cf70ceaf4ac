"""Norms and weights at every size that a dtype has, and complex numbers as pairs of real ones."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, isfinite, isnan, prod

import torch
from torch import Tensor

from ..._torch.storage import storage_of
from ..tracing import all_hold, is_traced

HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
_AT_ONCE = 2**20  # products that are held before they are added up
# How much torch may add up in float32, one after the other, before six digits are lost.
_PIECE = 1024  # squares of a norm, which it adds up in several lanes
_NUMBERS = 256  # products of two numbers
_ROWS = 256  # products of a weight and a row


def upcast_half(x: Tensor) -> Tensor:
    """Return half types as float32, all else as it is."""
    return x.float() if x.dtype in HALF_TYPES else x


def double(x: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a norm: real, and float32 at least."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.promote_types(real, torch.float32)


def as_rows(block: Tensor) -> Tensor:
    """Return (samples, ...) as a real matrix with one row per sample; a complex number is two real ones."""
    if block.is_complex():
        block = torch.view_as_real(block.resolve_conj())
    dims = block.dim()
    return block if dims == 2 else block.flatten(1) if dims > 1 else block[:, None]


def _norms(rows: Tensor) -> Tensor:
    """Return the norm of each row, in float64, where its dtype can hold the squares.

    torch adds up the squares of a row in its own dtype, one after the other: of a million numbers in float32 the norm
    is too small by 1e-5, of four million by 1e-4. So a long row is measured in pieces.
    """
    width = rows.shape[1]
    if width <= _PIECE or rows.dtype == torch.float64:
        return _short_norms(rows).double()
    whole = width - width % _PIECE
    pieces = torch.linalg.vector_norm(rows[:, :whole].view(len(rows), whole // _PIECE, _PIECE), dim=2)
    rest = _short_norms(rows[:, whole:])
    found: Tensor = torch.linalg.vector_norm(torch.cat([pieces, rest[:, None]], 1), dim=1, dtype=torch.float64)
    return found


def _short_norms(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return found


def row_norms(block: Tensor) -> Tensor:
    """Return the norm of each sample's part, in float64, also where its dtype cannot hold the squares."""
    rows = as_rows(block)
    norms = _norms(rows)
    smallest = _smallest_norm(rows.dtype, rows.shape[1])
    if is_traced():
        all_hold((norms > smallest) & (norms < torch.inf) | (row_max(rows) == 0))
        return norms
    if _lie_within(norms, smallest, torch.inf):
        return norms
    lossless = (norms > smallest) & (norms < torch.inf)
    few = rows[~lossless].double()
    size = row_max(few)
    unit = torch.where((size > 0) & (size < torch.inf), size, 1)
    norms[~lossless] = torch.linalg.vector_norm(few / unit[:, None], dim=1) * unit
    return norms


def _smallest_norm(dtype: torch.dtype, width: int) -> float:
    """Return above which size norms of rows are exact: each square too small for the dtype loses up to `tiny`."""
    smallest: float = (1e10 * torch.finfo(dtype).tiny * width) ** 0.5
    return smallest


def norms_of_rows(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return the `row_norms` of several tensors, with one look at all of them. Tensors in one place are read once."""
    rows = [as_rows(block) for block in blocks]
    places = [_place(each) for each in rows]
    distinct = dict(zip(places, rows, strict=True))
    norms = dict(zip(distinct, _norms_of_distinct(list(distinct.values())), strict=True))
    return [norms[place] for place in places]


def _norms_of_distinct(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    if len({each.dtype for each in rows}) != 1 or not all(each.shape[1] for each in rows):
        return [row_norms(each) for each in rows]
    measure = _norms if any(each.shape[1] > _PIECE for each in rows) else _short_norms
    norms = torch.stack([measure(each) for each in rows]).double()
    smallest = _smallest_norm(rows[0].dtype, max([each.shape[1] for each in rows]))
    found = norms.unbind()
    if is_traced():
        all_hold((norms > smallest) & (norms < torch.inf) | (torch.stack([row_max(each) for each in rows]) == 0))
        return found
    if _lie_within(norms.view(-1), smallest, inf):
        return found
    return [x if _lie_within(x, smallest, inf) else row_norms(each) for x, each in zip(found, rows, strict=True)]


def _place(rows: Tensor) -> tuple[object, ...]:
    """Return where a matrix lies, and how. Of those alive at one time, all in one place hold the same numbers."""
    start = rows.data_ptr() if not is_traced() else (storage_of(rows), rows.storage_offset())
    return start, rows.shape, rows.stride(), rows.dtype, rows.device


def row_max(block: Tensor) -> Tensor:
    """Return the size of the largest number of each sample, in float64."""
    if not block[:1].numel():
        return torch.zeros(len(block), dtype=torch.float64, device=block.device)
    block = block.abs() if block.is_complex() else block
    dims = tuple(range(1, block.dim()))
    return torch.maximum(block.amax(dims), block.amin(dims).neg()).double()  # 20 times as fast as torch's norm


def square(norms: Tensor) -> Tensor:
    """Return the squares of norms, in float64."""
    return norms.double().square()


def widen_for(x: Tensor, weights: Tensor) -> Tensor:
    """Return values in a dtype that can hold the weights they are about to be multiplied by: `x`, or float64."""
    x = upcast_half(x)
    info = torch.finfo(x.dtype)
    sizes = weights.abs()
    return x if _lie_within(sizes, info.tiny * 2.0**26, info.max * 2.0**-26, or_zero=True) else double(x)


# `cast`: weights as they were cast for a dtype and device, with the weights themselves, whose ids are the keys.
_local = threading.local()


@contextmanager
def unchanged_weights() -> Iterator[None]:
    """While open, nobody changes weights, so that each is tested and cast once for all that it is multiplied with."""
    _local.cast = {}
    try:
        yield
    finally:
        _local.cast = None


def _fitted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and the weights they are about to be multiplied by, in a dtype that can hold both."""
    x = upcast_half(x)
    key, cast = (id(weights), x.dtype, x.device), getattr(_local, "cast", None)
    if cast is None or key not in cast:
        x = widen_for(x, weights)
        fitting = weights.to(x)
        if cast is not None:
            cast[key] = fitting, weights
        return x, fitting
    fitting = cast[key][0]
    return x if fitting.dtype == x.dtype else double(x), fitting


# So many numbers are looked at one by one sooner than a few kernels can be launched.
_FEW = 128


def are_few(x: Tensor) -> bool:
    """Return whether numbers are to be computed with one by one, as Python's own."""
    return not is_traced() and x.numel() <= _FEW and x.device.type == "cpu"


def all_finite(x: Tensor) -> bool:
    """Return whether no number is NaN or infinite."""
    return all(map(isfinite, x.tolist())) if are_few(x) else all_hold(torch.isfinite(x))


def _lie_within(sizes: Tensor, smallest: float, largest: float, *, or_zero: bool = False) -> bool:
    """Return whether all numbers lie between two bounds, or are zero where that is allowed; no NaN does."""
    if is_traced() or sizes.numel() > _FEW:
        inside = (sizes > smallest) & (sizes < largest)
        return all_hold(inside | (sizes == 0) if or_zero else inside)
    values = sizes.tolist()
    if or_zero:
        values = [x for x in values if x != 0]
    # `min` and `max` may pass by a NaN, a sum does not.
    return not values or (smallest < min(values) and max(values) < largest and not isnan(sum(values)))


def weighted_sum(block: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over samples of weight times what belongs to the sample."""
    block, weights = _fitted(block, weights)
    if block.dim() == 2:
        return _sum_of_rows(weights, block)
    rows = block.reshape(block.shape[0], prod(block.shape[1:]))
    return _sum_of_rows(weights, rows).view(block.shape[1:])


def _sum_of_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """Return the weighted sum of the rows of a matrix: of many, the sums of some at a time, added up in float64.

    A product of matrices adds up in its own dtype: of a million equal numbers in float32 a hundredth was lost.
    """
    if len(rows) <= _ROWS:
        return weights @ rows
    whole = len(rows) - len(rows) % _ROWS
    first = torch.bmm(weights[:whole].view(-1, 1, _ROWS), rows[:whole].view(whole // _ROWS, _ROWS, rows.shape[1]))
    parts = torch.cat([first.squeeze(1), (weights[whole:] @ rows[whole:])[None]])
    wide = torch.complex128 if rows.is_complex() else torch.float64
    return parts.sum(0, dtype=wide).to(rows.dtype)


def inner_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of the rows of two matrices, in float64; of long rows, of some numbers at a time."""
    samples, others, width = len(left), len(right), left.shape[1]
    if width <= _NUMBERS or left.dtype == torch.float64:
        return (left @ right.T).double()
    whole = width - width % _NUMBERS
    total = (left[:, whole:] @ right[:, whole:].T).double()
    step = _NUMBERS * max(1, _AT_ONCE // max(1, samples * others))
    for start in range(0, whole, step):
        count = (min(start + step, whole) - start) // _NUMBERS
        a, b = (x[:, start : start + count * _NUMBERS].view(len(x), count, _NUMBERS) for x in (left, right))
        total = total + torch.bmm(a.transpose(0, 1), b.permute(1, 2, 0)).sum(0, dtype=torch.float64)
    return total


def scale_rows(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply what belongs to each sample by its weight."""
    x, weights = _fitted(x, weights)
    return x * weights.view(-1, *(1,) * (x.dim() - 1))


def is_moderate(x: Tensor) -> bool:
    """Return whether no sample's part is so large or so small that the product of four of its numbers is lost."""
    info, sizes = torch.finfo(x.dtype), row_max(x)
    return all_hold((sizes == 0) | ((sizes > info.tiny**0.2) & (sizes < info.max**0.2)))
