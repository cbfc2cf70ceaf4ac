"""Per-sample gradients of one value, each held in the form that is cheapest to ask.

A piece must be able to write its gradients down (`dense`). Every other question has a correct answer made
from that; a form that knows a shorter way overrides it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from ._grams import Grams

ALL = slice(None)
# Gradients written down only to be looked at are written this many bytes at a time.
CHUNK_BYTES = 1 << 22


class Piece(ABC):
    """Per-sample gradients of one value.

    Attributes:
        samples: how many samples there are.
        shape: shape of the value.
        how: one word for the plan that `PerSample.plan` prints.
        needs_op: whether it asks the recorded op, which must then still have what it saved.
    """

    samples: int
    shape: tuple[int, ...]
    how: str
    needs_op: bool = False

    @abstractmethod
    def dense(self, part: slice = ALL) -> Tensor:
        """Write down the gradients of these samples: (samples, *shape)."""

    def squared_norms(self, grams: Grams | None = None) -> Tensor:  # noqa: ARG002
        """Return the squared norm of each sample's gradient, in float64.

        Args:
            grams: where Gram matrices come from that several pieces need.
        """
        return torch.cat([square(lengths_of(self.dense(part))) for part in self.chunks()])

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the sum over samples of weight times gradient."""
        parts = [torch.tensordot(weights[part].to(d), d, 1) for part in self.chunks() for d in [self.dense(part)]]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        """Return the inner product of each sample's gradient with `direction`, in float64."""
        parts = []
        for part in self.chunks():
            block = self.dense(part).flatten(1)
            parts.append((block @ direction.to(block).reshape(-1)).double())
        return torch.cat(parts)

    def gram(self) -> Tensor:
        """Return the inner products between the gradients of all samples, in float64."""
        out = torch.zeros(self.samples, self.samples, dtype=torch.float64)
        for rows in self.chunks():
            left = self.dense(rows).flatten(1)
            for columns in self.chunks():
                right = left if columns == rows else self.dense(columns).flatten(1)
                out[rows, columns] = (left @ right.T).double()
        return out

    def chunks(self) -> Iterator[slice]:
        """Yield the samples in parts small enough to be written down."""
        return in_chunks(self.samples, prod(self.shape))

    def factors(self) -> tuple[Tensor, ...]:
        """Return what the norms will need the Gram matrices of."""
        return ()

    def saving(self) -> float:
        """Return what writing down would save when a weighted sum follows the norms, in multiply-adds."""
        return 0.0

    def size(self) -> int:
        """Return how many bytes that would take, about."""
        return 4 * self.samples * prod(self.shape)


class Dense(Piece):
    """Gradients that are written down already."""

    how = "stored"

    def __init__(self, values: Tensor) -> None:
        self.values = wide(values)
        self.samples, self.shape = values.shape[0], tuple(values.shape[1:])

    def dense(self, part: slice = ALL) -> Tensor:
        return self.values[part]

    def chunks(self) -> Iterator[slice]:
        yield ALL


class Computed(Piece):
    """Gradients that a function writes down when asked, and perhaps a shorter way to their weighted sum."""

    how = "streamed"

    def __init__(
        self,
        samples: int,
        shape: Sequence[int],
        dense: Callable[[slice], Tensor],
        weighted: Callable[[Tensor], Tensor] | None = None,
        *,
        how: str = "streamed",
    ) -> None:
        self.samples, self.shape, self.how = samples, tuple(shape), how
        self._dense, self._weighted = dense, weighted

    def dense(self, part: slice = ALL) -> Tensor:
        return wide(self._dense(part))

    def weighted(self, weights: Tensor) -> Tensor:
        return super().weighted(weights) if self._weighted is None else self._weighted(weights)

    def saving(self) -> float:
        return float(self.samples * prod(self.shape))


def in_chunks(samples: int, numbers: int) -> Iterator[slice]:
    """Yield the samples in parts, given how many numbers each of them takes."""
    size = max(1, CHUNK_BYTES // max(1, 4 * numbers))
    for start in range(0, max(samples, 1), size):
        yield slice(start, min(start + size, samples))


def redo_where_cancelled(piece: Piece, squares: Tensor, bound: Tensor, eps: float) -> Tensor:
    """Compute those norms again from the gradients themselves that cancellation may have spoiled.

    `bound` is the sum of the absolute values whose sum is `squares`; their rounding errors are about `eps`
    times as large. Also catches an overflow, and keeps a norm from being negative.
    """
    spoiled = ~(squares > 3e3 * eps * bound) & ~(bound == 0)
    if not bool(spoiled.any()):
        return squares.clamp(min=0)
    squares = squares.clone()
    for i in spoiled.nonzero().squeeze(1).tolist():
        squares[i] = square(lengths_of(piece.dense(slice(i, i + 1))))[0]
    return squares.clamp(min=0)


def wide(x: Tensor) -> Tensor:
    """Return half types as float32, all else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def lengths_of(block: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(block.flatten(1), dim=1)
    return lengths


def square(lengths: Tensor) -> Tensor:
    return lengths.double().square()
