"""Per-sample gradients of one value, each held in the form that is cheapest to ask.

A piece must be able to write its gradients down (`dense`). Every other question has a correct answer made
from that; a form that knows a shorter way overrides it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .gram_cache import Grams
from .numerics import able_to_hold, lengths_of, rows_of, square, wide

if TYPE_CHECKING:
    from typing_extensions import Self

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
        parts = []
        for part in self.chunks():
            block = able_to_hold(self.dense(part), weights)
            parts.append(torch.tensordot(weights[part].to(block), block, 1))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        """Return the real inner product of each sample's gradient with `direction`, in float64."""
        parts = []
        for part in self.chunks():
            block = self.dense(part)
            parts.append((rows_of(block) @ rows_of(direction.to(block)[None])[0]).double())
        return torch.cat(parts)

    def gram(self) -> Tensor:
        """Return the real inner products between the gradients of all samples, in float64."""
        out = torch.zeros(self.samples, self.samples, dtype=torch.float64)
        for rows in self.chunks():
            left = rows_of(self.dense(rows))
            for columns in self.chunks():
                right = left if columns == rows else rows_of(self.dense(columns))
                out[rows, columns] = (left @ right.T).double()
        return out

    def joined(self, others: Sequence["Self"]) -> "Piece | None":  # noqa: ARG002
        """Return the gradients of a value with several uses in this form; None if the form has no such way."""
        return None

    def cross(self, other: "Piece") -> Tensor | None:  # noqa: ARG002
        """Return each sample's inner product with its gradient in another form, if there is a short way."""
        return None

    def outer_factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the two factors of a sum of outer products, if it is one."""
        return None

    def swapped(self, dims: tuple[int, int]) -> "Piece | None":  # noqa: ARG002
        """Return the gradients of the value with two dimensions (counted from the last) swapped, in this form."""
        return None

    def reshaped(self, shape: Sequence[int]) -> "Piece | None":  # noqa: ARG002
        """Return the gradients of the reshaped value, in this form."""
        return None

    @property
    def stored(self) -> Tensor | None:
        """The gradients, if they are written down already."""
        return None

    @property
    def is_sparse(self) -> bool:
        """Whether a weighted sum is a sparse tensor."""
        return False

    def chunks(self) -> Iterator[slice]:
        """Yield the samples in parts small enough to be written down."""
        return in_chunks(self.samples, prod(self.shape))

    def holds(self) -> tuple[Tensor, ...]:
        """Return the tensors that answers are made of, which may lie in the user's memory."""
        return ()

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

    def joined(self, others: Sequence["Self"]) -> "Dense":
        total = self.values
        for other in others:
            total = total + other.values
        return Dense(total)

    def swapped(self, dims: tuple[int, int]) -> "Dense":
        return Dense(self.values.transpose(*dims))

    def reshaped(self, shape: Sequence[int]) -> "Dense":
        return Dense(self.values.reshape(self.samples, *shape))

    @property
    def stored(self) -> Tensor:
        return self.values

    def chunks(self) -> Iterator[slice]:
        yield ALL

    def holds(self) -> tuple[Tensor, ...]:
        return (self.values,)


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
        holds: Sequence[Tensor] = (),
        how: str = "streamed",
        needs_op: bool = False,
    ) -> None:
        self.samples, self.shape, self.how, self.needs_op = samples, tuple(shape), how, needs_op
        self._dense, self._weighted, self._holds = dense, weighted, tuple(holds)

    def dense(self, part: slice = ALL) -> Tensor:
        return wide(self._dense(part))

    def weighted(self, weights: Tensor) -> Tensor:
        return super().weighted(weights) if self._weighted is None else self._weighted(weights)

    def holds(self) -> tuple[Tensor, ...]:
        return self._holds

    def saving(self) -> float:
        return float(self.samples * prod(self.shape))


def in_chunks(samples: int, numbers: int) -> Iterator[slice]:
    """Yield the samples in parts, given how many numbers each of them takes."""
    size = max(1, CHUNK_BYTES // max(1, 4 * numbers))
    for start in range(0, max(samples, 1), size):
        yield slice(start, min(start + size, samples))


def redo_where_lost(piece: Piece, squares: Tensor, doubt: Tensor) -> Tensor:
    """Compute those norms again from the gradients themselves that rounding may have spoiled.

    Args:
        piece: whose norms these are.
        squares: their squares.
        doubt: how large the error of each square may be, about. Nothing but zero has no doubt at all.
    """
    spoiled = ~(squares > 3e3 * doubt) & ~(doubt == 0)
    if not bool(spoiled.any()):
        return squares.clamp(min=0)
    squares = squares.clone()
    for i in spoiled.nonzero().squeeze(1).tolist():
        squares[i] = square(lengths_of(piece.dense(slice(i, i + 1))))[0]
    return squares.clamp(min=0)
