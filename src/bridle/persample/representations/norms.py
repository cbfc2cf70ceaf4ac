"""Norms of each sample's gradient, of every parameter and of all together."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .base import Piece
from .gram_cache import Grams
from .numerics import lengths_of

# Squares beyond these have lost digits in float64, or all of them.
_SMALLEST, _LARGEST = 1e-290, 1e300


class Norms:
    """The norms of each sample's gradient, in float64.

    Attributes:
        each: name -> (samples,).
        total: of all parameters together, (samples,).
    """

    def __init__(self, pieces: Mapping[str, Piece], samples: int, extreme: frozenset[str]) -> None:
        """Compute them.

        Args:
            pieces: the gradients.
            samples: how many samples there are.
            extreme: names of those whose squares may be beyond float64.
        """
        grams = Grams(factor for piece in pieces.values() for factor in piece.factors())
        self.each = {name: _lengths(piece, grams, name in extreme) for name, piece in pieces.items()}
        parts = list(self.each.values()) or [torch.zeros(samples, dtype=torch.float64)]
        self.total = lengths_of(torch.stack(parts, 1))


def _lengths(piece: Piece, grams: Grams, extreme: bool) -> Tensor:
    squares = piece.squared_norms(grams)
    lengths = squares.sqrt()
    if extreme:
        lost = ~((squares > _SMALLEST) & (squares < _LARGEST))
        for i in lost.nonzero().squeeze(1).tolist():
            lengths[i] = lengths_of(piece.dense(slice(i, i + 1)))[0]
    return lengths
