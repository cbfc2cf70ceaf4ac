"""Per-sample gradients of one value, each held in the representation that is cheapest to compute with.

Every representation can materialise its gradients (`dense`). All other methods default to that; subclasses override
what they can compute without it.

Legend of products: b sample, t row of a sample (a token, a pixel, one call of a shared layer), m and n the two sides of
the matrix. The gradient of sample b is the sum over t of left[b, t, :] times right[b, t, :].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tracing import all_hold, is_traced
from .numerics import (
    HALF_TYPES,
    as_rows,
    double,
    gram_error_bound,
    gram_sums,
    inner_products,
    is_moderate,
    row_norms,
    rows_in_strip,
    scale_rows,
    upcast_half,
    weighted_sum,
)

if TYPE_CHECKING:
    from typing_extensions import Self

ALL = slice(None)
# Gradients written down only to be looked at are written this many bytes at a time.
CHUNK_BYTES = 1 << 22
# Writing or reading one number costs about as much as this many multiply-adds in a large matrix product.
TRAFFIC = 16.0


class SampleGrads(ABC):
    """Per-sample gradients of one value.

    Attributes:
        samples: how many samples there are.
        shape: shape of the value.
        strategy: one word for the plan that `PerSample.plan` prints.
        runs_op: whether it runs the recorded op, which must then still have what it saved.
        held_tensors: the tensors that answers are made of, which may lie in the user's memory.
        flops_saved: what writing down would save when a weighted sum follows the norms, in multiply-adds.
    """

    samples: int
    shape: tuple[int, ...]
    strategy: str
    runs_op: bool = False
    held_tensors: tuple[Tensor, ...] = ()
    flops_saved: float = 0.0

    @abstractmethod
    def dense(self, part: slice = ALL) -> Tensor:
        """Write down the gradients of these samples: (samples, *shape)."""

    def norms(self) -> Tensor:
        """Return the norm of each sample's gradient, in float64."""
        return torch.cat([row_norms(self.dense(part)) for part in self.chunks()])

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the sum over samples of weight times gradient."""
        parts = []
        for part in self.chunks():
            parts.append(weighted_sum(self.dense(part), weights[part]))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        """Return the real inner product of each sample's gradient with `direction`, in float64."""
        parts = []
        for part in self.chunks():
            block = self.dense(part)
            parts.append(inner_products(as_rows(block), as_rows(direction.to(block)[None])).squeeze(1))
        return torch.cat(parts)

    def gram(self) -> Tensor:
        """Return the real inner products between the gradients of all samples, in float64."""
        blocks = []
        for rows in self.chunks():
            left = as_rows(self.dense(rows))
            others = (left if columns == rows else as_rows(self.dense(columns)) for columns in self.chunks())
            blocks.append(torch.cat([inner_products(left, right) for right in others], 1))
        return torch.cat(blocks)

    def joined(self, others: Sequence["Self"]) -> "SampleGrads | None":  # noqa: ARG002
        """Return the gradients of a value with several uses, represented like this; None if there is no such way."""
        return None

    def cross(self, other: "SampleGrads") -> Tensor | None:  # noqa: ARG002
        """Return each sample's inner product with its gradient in another representation, if there is a short way."""
        return None

    def swapped(self, dims: tuple[int, int]) -> "SampleGrads | None":  # noqa: ARG002
        """Return the gradients of the value with two dimensions (counted from the last) swapped, if it can."""
        return None

    def chunks(self) -> Iterator[slice]:
        """Yield the samples in parts small enough to be written down."""
        return in_chunks(self.samples, prod(self.shape))

    def nbytes(self) -> int:
        """Return how many bytes writing down would take, about."""
        return 4 * self.samples * prod(self.shape)


class Dense(SampleGrads):
    """Gradients that are written down already."""

    strategy = "stored"

    def __init__(self, values: Tensor) -> None:
        self.values = values.float() if values.dtype in HALF_TYPES else values
        self.samples, *shape = values.shape
        self.shape, self.held_tensors = tuple(shape), (self.values,)

    def dense(self, part: slice = ALL) -> Tensor:
        return self.values[part]

    def norms(self) -> Tensor:
        return row_norms(self.values)

    def weighted(self, weights: Tensor) -> Tensor:
        return weighted_sum(self.values, weights)

    def joined(self, others: Sequence["Self"]) -> "Dense":
        total = self.values
        for other in others:
            total = total + other.values
        return Dense(total)

    def swapped(self, dims: tuple[int, int]) -> "Dense":
        return Dense(self.values.transpose(*dims))

    def chunks(self) -> Iterator[slice]:
        yield ALL


class Outer(SampleGrads):
    """Gradients that are sums of outer products, held as their two factors."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.samples, self.rows, m = left.shape
        self.shape = (m, right.shape[-1])
        gram, streamed = self._costs()
        self.strategy = "gram" if gram <= streamed and not left.is_complex() else "streamed"
        self.held_tensors = (left, right)
        # Written down, one product serves the norm and the sum, and is then read twice.
        self.flops_saved = self.samples * (min(gram, streamed) - 3 * TRAFFIC * m * right.shape[-1])

    def joined(self, others: Sequence["Self"]) -> "Outer":
        """Concatenate the rows of several uses of one matrix: the same sum."""
        uses = (self, *others)
        return Outer(torch.cat([use.left for use in uses], 1), torch.cat([use.right for use in uses], 1))

    def swapped(self, dims: tuple[int, int]) -> "Outer | None":
        return Outer(self.right, self.left) if dims == (-2, -1) else None

    def dense(self, part: slice = ALL) -> Tensor:
        left, right = (x[part].float() if x.dtype in HALF_TYPES else x[part] for x in (self.left, self.right))
        return torch.bmm(left.transpose(1, 2), right)

    def norms(self) -> Tensor:
        if self.rows == 1:
            return row_norms(upcast_half(self.left)) * row_norms(upcast_half(self.right))
        if self.strategy != "gram":
            return super().norms()
        squares, bound, largest = gram_sums(self.left, self.right)
        error_bound = gram_error_bound(squares, bound, largest, (self.rows, *self.shape), (self.left, self.right))
        return norms_of_squares(self, squares, error_bound)

    def weighted(self, weights: Tensor) -> Tensor:
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:
            left = scale_rows(left, weights)
        else:
            right = scale_rows(right, weights)
        if left.dtype != right.dtype:
            dtype = torch.promote_types(left.dtype, right.dtype)
            left, right = left.to(dtype), right.to(dtype)
        if self.left.stride(0) < self.left.stride(1):  # rows lie by time, then by sample: copied otherwise
            left, right = left.transpose(0, 1), right.transpose(0, 1)
        return torch.mm(left.flatten(0, 1).T, right.flatten(0, 1))

    def dot(self, direction: Tensor) -> Tensor:
        if self.left.is_complex():
            return super().dot(direction)
        left, right = upcast_half(self.left), upcast_half(self.right)
        return ((left @ direction.to(left)) * right).sum((1, 2), dtype=torch.float64)

    def gram(self) -> Tensor:
        if self.left.is_complex() or (self.rows > 1 and self.rows**2 * sum(self.shape) > self.shape[0] * self.shape[1]):
            return super().gram()
        left, right = (x if is_moderate(x) else double(x) for x in (upcast_half(self.left), upcast_half(self.right)))
        left, right = left.flatten(0, 1), right.flatten(0, 1)
        products = (left @ left.T) * (right @ right.T)
        if self.rows == 1:
            return products.double()
        cut = products.view(self.samples, self.rows, self.samples, self.rows)
        return cut.sum((1, 3), dtype=torch.float64)

    def _costs(self) -> tuple[float, float]:
        m, n, t = *self.shape, self.rows
        if t == 1:
            return 0.0, 1.0
        streamed = t * m * n + 2 * TRAFFIC * m * n
        if not self.left.is_cpu:  # whether a Gram matrix has cancelled is a value of the device
            return inf, streamed
        pairs = t * (t + min(t, rows_in_strip(t))) / 2
        return pairs * (m + n + 2 * TRAFFIC), streamed


class Computed(SampleGrads):
    """Gradients that a function writes down when asked, and perhaps a shorter way to their weighted sum."""

    strategy = "streamed"

    def __init__(
        self,
        samples: int,
        shape: Sequence[int],
        dense: Callable[[slice], Tensor],
        weighted: Callable[[Tensor], Tensor] | None = None,
        *,
        held_tensors: Sequence[Tensor] = (),
        strategy: str = "streamed",
        runs_op: bool = False,
    ) -> None:
        self.samples, self.shape, self.strategy, self.runs_op = samples, tuple(shape), strategy, runs_op
        self._dense, self._weighted, self.held_tensors = dense, weighted, tuple(held_tensors)
        self.flops_saved = float(self.samples * prod(self.shape))

    def dense(self, part: slice = ALL) -> Tensor:
        return upcast_half(self._dense(part))

    def weighted(self, weights: Tensor) -> Tensor:
        return super().weighted(weights) if self._weighted is None else self._weighted(weights)


def stored(grads: SampleGrads, budget: int) -> tuple[SampleGrads, int]:
    """Write down gradients if that saves time and fits into a budget of bytes; return them and what is left of it."""
    size = grads.nbytes()
    return (Dense(grads.dense()), budget - size) if grads.flops_saved > 0 and size <= budget else (grads, budget)


def in_chunks(samples: int, numbers: int) -> Iterator[slice]:
    """Yield the samples in parts, given how many numbers each of them takes."""
    size = max(1, CHUNK_BYTES // max(1, 4 * numbers))
    for start in range(0, max(samples, 1), size):
        yield slice(start, min(start + size, samples))


def norms_of_squares(grads: SampleGrads, squares: Tensor, error_bound: Tensor) -> Tensor:
    """Return norms made from squares; those that rounding may have spoiled, from the gradients themselves.

    Args:
        grads: whose norms these are.
        squares: their squares.
        error_bound: how large the error of each square may be, about. Only what is zero for certain has none.
    """
    sound = squares > 3e5 * error_bound  # errors were up to seven times the bound: a norm is right to five digits
    if not is_traced() and bool(sound.all()):
        return squares.sqrt()
    norms = squares.clamp(min=0).sqrt()
    spoiled = ~sound & ~(error_bound == 0)
    if not all_hold(~spoiled):
        for i in spoiled.nonzero().squeeze(1).tolist():
            norms[i] = row_norms(grads.dense(slice(i, i + 1)))[0]
    return norms


class Sum(SampleGrads):
    """The gradients of a value that is used in several places."""

    def __init__(self, uses: Sequence[SampleGrads]) -> None:
        self.uses = tuple(uses)
        self.samples, self.shape = uses[0].samples, uses[0].shape
        self.strategy = "+".join(dict.fromkeys(use.strategy for use in uses))
        self.held_tensors = tuple(tensor for use in uses for tensor in use.held_tensors)

    def dense(self, part: slice = ALL) -> Tensor:
        total = self.uses[0].dense(part)
        for use in self.uses[1:]:
            total = total + use.dense(part)
        return total

    def norms(self) -> Tensor:
        crosses = [_cross(a, b) for i, a in enumerate(self.uses) for b in self.uses[i + 1 :]]
        if not all(tensor.is_cpu for tensor in self.held_tensors) or any(cross is None for cross in crosses):
            return super().norms()
        each = torch.stack([use.norms() for use in self.uses])
        total = each.square().sum(0)
        bound = total.clone()  # of the absolute values whose sum this is; rounding errors are about eps as large
        for cross in crosses:
            assert cross is not None
            total += 2 * cross
            bound += 2 * cross.abs()
        error_bound = bound * torch.finfo(torch.float32).eps + torch.finfo(torch.float64).tiny
        return norms_of_squares(self, total, error_bound.where(each.amax(0) > 0, 0))

    def weighted(self, weights: Tensor) -> Tensor:
        return torch.stack([use.weighted(weights) for use in self.uses]).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        return torch.stack([use.dot(direction) for use in self.uses]).sum(0)


def _cross(a: SampleGrads, b: SampleGrads) -> Tensor | None:
    product = a.cross(b)
    return b.cross(a) if product is None else product


def merged(uses: Sequence[SampleGrads]) -> SampleGrads:
    """Return the gradients of a value with several uses: those in one representation joined, then their sum."""
    if len(uses) == 1:
        return uses[0]
    by_type: dict[type[SampleGrads], list[SampleGrads]] = {}
    for use in uses:
        by_type.setdefault(type(use), []).append(use)
    whole: list[SampleGrads] = []
    for first, *rest in by_type.values():
        joined = first.joined(rest) if rest else first
        whole += [first, *rest] if joined is None else [joined]
    return whole[0] if len(whole) == 1 else Sum(whole)
