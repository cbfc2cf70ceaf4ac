"""Norms of each sample's gradient, of every parameter and of all together."""

from collections.abc import Mapping
from functools import reduce
from itertools import islice
from operator import mul

import torch
from torch import Tensor

from ..tracing import all_hold
from .base import SampleGrads
from .numerics import norms_of_rows, row_norms

# Squares beyond these have lost digits in float64, or all of them.
_SMALLEST, _LARGEST = 1e-290, 1e300


class Norms:
    """The norms of each sample's gradient, in float64.

    Attributes:
        each: name -> (samples,).
        total: of all parameters together, (samples,).
    """

    def __init__(self, gradients: Mapping[str, SampleGrads], samples: int, extreme: frozenset[str]) -> None:
        """Compute them.

        Args:
            gradients: the gradients.
            samples: how many samples there are.
            extreme: names of those whose squares may be beyond float64.
        """
        short = _by_factors(gradients)
        self.each = {
            name: short[name] if name in short else _norms(one, name in extreme) for name, one in gradients.items()
        }
        parts = list(self.each.values()) or [torch.zeros(samples, dtype=torch.float64)]
        self.total = row_norms(torch.stack(parts, 1))


def _by_factors(gradients: Mapping[str, SampleGrads]) -> dict[str, Tensor]:
    """Return the norms of those representations that have factors, all of which are looked at together."""
    factors = {name: found for name, one in gradients.items() if (found := one.norm_factors())}
    norms = iter(norms_of_rows([x for found in factors.values() for x in found]))
    return {name: reduce(mul, islice(norms, len(found))) for name, found in factors.items()}


def _norms(one: SampleGrads, extreme: bool) -> Tensor:
    squares = one.squared_norms()
    norms = squares.sqrt()
    if extreme:
        kept = (squares > _SMALLEST) & (squares < _LARGEST)
        for i in () if all_hold(kept) else (~kept).nonzero().squeeze(1).tolist():
            norms[i] = row_norms(one.dense(slice(i, i + 1)))[0]
    return norms
