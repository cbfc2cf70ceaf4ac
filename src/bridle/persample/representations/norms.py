"""Norms of each sample's gradient, of every parameter and of all together."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..tracing import all_hold
from .base import SampleGrads
from .gram_cache import GramCache
from .numerics import row_norms

# Squares beyond these have lost digits in float64, or all of them.
_SMALLEST, _LARGEST = 1e-290, 1e300


class Norms:
    """The norms of each sample's gradient, in float64.

    Attributes:
        each: name -> (samples,).
        total: of all parameters together, (samples,).
    """

    def __init__(self, forms: Mapping[str, SampleGrads], samples: int, extreme: frozenset[str]) -> None:
        """Compute them.

        Args:
            forms: the gradients.
            samples: how many samples there are.
            extreme: names of those whose squares may be beyond float64.
        """
        grams = GramCache(factor for form in forms.values() for factor in form.gram_factors)
        self.each = {name: _lengths(form, grams, name in extreme) for name, form in forms.items()}
        parts = list(self.each.values()) or [torch.zeros(samples, dtype=torch.float64)]
        self.total = row_norms(torch.stack(parts, 1))


def _lengths(form: SampleGrads, grams: GramCache, extreme: bool) -> Tensor:
    squares = form.squared_norms(grams)
    lengths = squares.sqrt()
    if extreme:
        kept = (squares > _SMALLEST) & (squares < _LARGEST)
        for i in () if all_hold(kept) else (~kept).nonzero().squeeze(1).tolist():
            lengths[i] = row_norms(form.dense(slice(i, i + 1)))[0]
    return lengths
