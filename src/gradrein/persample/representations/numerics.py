"""Norms and weights at every size that a dtype has, and complex numbers as pairs of real ones.

On the host a look at a value is free: what is fast and nearly always right is computed first, and looked at. On a
device it would be to wait for it: there dtypes decide, and sums of squares are added up in float64.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

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


def row_norms(block: Tensor) -> Tensor:
    """Return the norm of each sample's part, in float64, also where its dtype cannot hold the squares."""
    rows = as_rows(block)
    if not rows.is_cpu:
        return _safe_norms(rows)
    norms = _fast_norms(rows)
    # Each square that is too small for the dtype loses up to `tiny`.
    smallest: float = (1e10 * torch.finfo(rows.dtype).tiny * rows.shape[1]) ** 0.5
    if is_traced():
        all_hold((norms > smallest) & (norms < torch.inf) | (row_max(rows) == 0))
        return norms
    if not norms.numel():
        return norms
    low, high = norms.aminmax()  # NaN where there is one
    if not (low > smallest and high < torch.inf):
        lossy = ~((norms > smallest) & (norms < torch.inf))
        norms[lossy] = _safe_norms(rows[lossy].double())
    return norms


def _fast_norms(rows: Tensor) -> Tensor:
    """Return the norm of each row where its dtype can hold the squares.

    torch adds up the squares of a row in its own dtype, one after the other: of a million numbers in float32 the norm
    is too small by 1e-5, of four million by 1e-4. So a long row is measured in pieces.
    """
    width = rows.shape[1]
    norms: Tensor
    if width <= _PIECE or rows.dtype == torch.float64:
        norms = torch.linalg.vector_norm(rows, dim=1)
        return norms.double()
    whole = width - width % _PIECE
    pieces = torch.linalg.vector_norm(rows[:, :whole].view(len(rows), whole // _PIECE, _PIECE), dim=2)
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1)
    norms = torch.linalg.vector_norm(torch.cat([pieces, rest[:, None]], 1), dim=1, dtype=torch.float64)
    return norms


def _safe_norms(rows: Tensor) -> Tensor:
    """Return the norm of each row, with its squares in float64; of float64 itself, relative to its largest number."""
    if rows.dtype != torch.float64:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return norms
    size = row_max(rows)
    unit = torch.where((size > 0) & (size < torch.inf), size, 1)
    norms = torch.linalg.vector_norm(rows / unit[:, None], dim=1)
    return norms * unit


def total_norms(parts: Sequence[Tensor], samples: int, *, extreme: bool) -> Tensor:
    """Return the norm of each sample over all parameters, given those of some at a time, in float64.

    Args:
        parts: the norms.
        samples: how many samples there are.
        extreme: whether float64 may not hold the squares of norms.
    """
    if len(parts) < 2:
        return parts[0] if parts else torch.zeros(samples, dtype=torch.float64)
    together = torch.stack([part.to(parts[0].device) for part in parts], 1)
    total: Tensor = row_norms(together) if extreme else torch.linalg.vector_norm(together, dim=1)
    return total


def row_max(block: Tensor) -> Tensor:
    """Return the size of the largest number of each sample, in float64."""
    if not block[:1].numel():
        return torch.zeros(len(block), dtype=torch.float64, device=block.device)
    block = block.abs() if block.is_complex() else block
    dims = tuple(range(1, block.dim()))
    return torch.maximum(block.amax(dims), block.amin(dims).neg()).double()  # 20 times as fast as torch's norm


def narrowed(weights: Tensor) -> Tensor:
    """Return weights in float32, if they were looked at and float32 can hold them."""
    if weights.dtype != torch.float64 or not weights.is_cpu:
        return weights
    info, sizes = torch.finfo(torch.float32), weights.abs()
    fits = (sizes > info.tiny * 2.0**26) & (sizes < info.max * 2.0**-26) | (sizes == 0)
    return weights.float() if all_hold(fits) else weights


def _fitted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and the weights they are about to be multiplied by, in a dtype that can hold both."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, torch.float32), weights.dtype)
    return x.to(dtype), weights.to(x.device, dtype)


def scale_rows(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply what belongs to each sample by its weight."""
    x, weights = _fitted(x, weights)
    return x * weights.view(-1, *(1,) * (x.dim() - 1))


def weighted_sum(block: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over samples of weight times what belongs to the sample.

    A product of matrices adds up in its own dtype: of a million equal numbers in float32 a hundredth was lost. So of
    many samples, the sums of some at a time are added up in float64.
    """
    block, weights = _fitted(block, weights)
    rows = block.reshape(len(block), prod(block.shape[1:]))
    if len(rows) <= _ROWS:
        return (weights @ rows).view(block.shape[1:])
    whole = len(rows) - len(rows) % _ROWS
    first = torch.bmm(weights[:whole].view(-1, 1, _ROWS), rows[:whole].view(whole // _ROWS, _ROWS, rows.shape[1]))
    parts = torch.cat([first.squeeze(1), (weights[whole:] @ rows[whole:])[None]])
    exact = torch.complex128 if rows.is_complex() else torch.float64
    return parts.sum(0, dtype=exact).to(rows.dtype).view(block.shape[1:])


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


def is_moderate(x: Tensor) -> bool:
    """Return whether no sample's part is so large or so small that the product of four of its numbers is lost."""
    info, sizes = torch.finfo(x.dtype), row_max(x)
    return all_hold((sizes == 0) | ((sizes > info.tiny**0.2) & (sizes < info.max**0.2)))


def rows_in_strip(rows: int) -> int:
    """Return how many rows to take at a time: few, to skip most of the upper half, yet enough for a fast product."""
    return min(max(32, rows // 8), 128)


def _gram_strips(x: Tensor) -> Iterator[Tensor]:
    """Yield ``x @ x.T`` of each sample in strips of rows, each without what lies right of the diagonal."""
    x, step = upcast_half(x), rows_in_strip(x.shape[1])
    for start in range(0, x.shape[1], step):
        end = min(start + step, x.shape[1])
        yield x[:, start:end] @ x[:, :end].transpose(1, 2)


def gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared norms made from Gram matrices, and what their error follows from; all in float64.

    Returns:
        The squared norms, the sums of the absolute values in them, and the largest squared norms of a row.
    """
    step = rows_in_strip(left.shape[1])
    squares, bounds, diagonals = [], [], []
    for i, (a, b) in enumerate(zip(_gram_strips(left), _gram_strips(right), strict=True)):
        strip = a * b
        if i:
            strip[:, :, : i * step] *= 2  # what is left of the diagonal stands for the other half as well
        squares.append(strip.sum((1, 2), dtype=torch.float64))
        bounds.append(torch.linalg.vector_norm(strip, 1, dim=(1, 2)))
        diagonals.append([x.diagonal(i * step, 1, 2) for x in (a, b)])
    if not squares:
        nothing = torch.zeros(len(left), dtype=torch.float64, device=left.device)
        return nothing, nothing, nothing
    largest = [torch.cat(parts, 1).amax(1).double() for parts in zip(*diagonals, strict=True)]
    return torch.stack(squares).sum(0), torch.stack(bounds).double().sum(0), largest[0] + largest[1]


def gram_error_bound(
    squares: Tensor, bound: Tensor, largest: Tensor, sizes: tuple[int, ...], factors: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the error of norms made from Gram matrices.

    Args:
        squares: the squared norms.
        bound: the sums of the absolute values in them, which are rounded.
        largest: the largest squared length of a row. A product that is too small for the dtype takes up to `tiny`
            from a number of one matrix, which is then multiplied by one of the other.
        sizes: how many rows there are, and the two sides of the matrix.
        factors: what the gradients are products of. Where one of them is zero there is no error.
    """
    left, right = factors
    info = torch.finfo(torch.promote_types(left.dtype, torch.float32))
    rows, *sides = sizes
    error_bound = info.eps * bound + info.tiny * rows**2 * (sum(sides) * largest + 1)
    if not is_traced() and bool(squares.all()):
        return error_bound
    nothing = (row_max(left) == 0) | (row_max(right) == 0)
    return error_bound.where((squares != 0) | ~nothing, 0)
