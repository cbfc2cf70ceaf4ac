"""Sums over samples: what each is multiplied by, and the sum for each parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import are_few, double
from ..tracing import all_hold

# Makes the sum for a parameter; None where no loss depends on it.
Weigh: TypeAlias = Callable[[str], Tensor | None]


def weigher(forms: Mapping[str, SampleGrads], weights: Mapping[str, Tensor], good: Tensor | None = None) -> Weigh:
    """Return what makes the weighted sum of a parameter.

    Args:
        forms: the gradients.
        weights: the weight of each sample, for each parameter.
        good: which samples are summed; all by default.
    """

    def weigh(name: str) -> Tensor | None:
        form = forms.get(name)
        if form is None:
            return None
        return form.weighted(weights[name]) if good is None else _finite_weighted(form, weights[name], good)

    return weigh


def _finite_weighted(form: SampleGrads, weights: Tensor, good: Tensor) -> Tensor:
    """Weigh and sum some samples; one that is left out must not come back as zero times NaN."""
    total = torch.zeros(form.shape, dtype=torch.float64, device=good.device)
    for i in good.nonzero().squeeze(1).tolist():
        total = total + double(form.dense(slice(i, i + 1))[0]) * weights[i]
    return total


def local_sums(parameters: Mapping[str, Tensor], wanted: Sequence[bool], weigh: Weigh) -> Iterator[tuple[str, Tensor]]:
    """Yield the sum for each parameter that is wanted: zeros where no loss here depends on it.

    Args:
        parameters: sums are in their dtype, and in float32 at least.
        wanted: for each, whether there is to be a sum.
        weigh: makes the sum of one of these.
    """
    for (name, parameter), want in zip(parameters.items(), wanted, strict=True):
        if not want:
            continue
        total = weigh(name)
        if total is None:
            total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if total.dtype != parameter.dtype or total.dtype != torch.float32:
            total = total.to(torch.promote_types(parameter.dtype, torch.float32))
        yield name, total


def factors(norms: Tensor, limit: float, gamma: float | None) -> Tensor:
    """Return what each sample's gradient is multiplied by to clip it."""
    if gamma is not None:
        normalised = (limit / (norms + gamma)).where(norms > 0, 0)
        if not all_hold(~torch.isinf(normalised)):
            raise ArgumentError(
                f"clip_: a norm of {float(norms[torch.isinf(normalised)][0]):.0e} is too small to be scaled to "
                f"{limit}. Pass a larger gamma."
            )
        return normalised
    if are_few(norms):  # with the bits of what is below, where torch multiplies by the reciprocal
        found = [min(1.0, limit * (1 / norm)) if norm > 0 else 1.0 for norm in norms.tolist()]
        return torch.tensor(found, dtype=norms.dtype)
    return (limit / norms).clamp(max=1).where(norms > 0, 1)


def keep_what_pays(forms: Mapping[str, SampleGrads], budget: int, parameters: int) -> dict[str, SampleGrads]:
    """Write down gradients that are needed twice: for the norms and for the sum after them.

    Args:
        forms: the gradients.
        budget: how many bytes may be taken.
        parameters: how many bytes the parameters take.

    Returns:
        Those that were written down.
    """
    pays = {name: form.flops_saved for name, form in forms.items()}
    per_byte = {name: saved / max(1, prod(forms[name].shape)) for name, saved in pays.items() if saved > 0}
    # Saving only a Gram is worth no more memory, while the graph is kept as well, than training takes anyhow: for
    # parameters, gradients and the two states of Adam.
    for_grams = 4 * parameters
    kept: dict[str, SampleGrads] = {}
    for name in sorted(per_byte, key=lambda name: -per_byte[name]):
        form = forms[name]
        size, is_gram = form.nbytes(), form.strategy == "gram"
        if size <= (min(budget, for_grams) if is_gram else budget):
            budget -= size
            for_grams -= size if is_gram else 0
            kept[name] = Dense(form.dense())
    return kept
