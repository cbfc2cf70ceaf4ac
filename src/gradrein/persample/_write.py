"""Answers that write to ``.grad``: weighted sums, clipped sums."""

from collections.abc import Callable
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .._torch.dtensor import stored_shard
from .._torch.dynamo import untraced
from ..errors import NonFiniteGradientError
from ._arguments import check_weights, refuse_unreached
from ._clip_settings import ClipSettings
from ._gradients import BatchGradients
from ._ranks import Handshake
from ._reduce import add_up, factors, local_sums, nonfinite_message, weigher
from .accumulate import accumulate
from .representations.base import Dense
from .representations.numerics import all_finite, unchanged_weights

Weights: TypeAlias = Tensor | Callable[[Tensor], Tensor]


class WriteAnswers(BatchGradients):
    """Results that are added to each parameter's ``.grad``, as backward does."""

    @untraced
    def weighted_(self, weights: Weights) -> None:
        """Add the weighted sum of the samples' gradients to each parameter's ``.grad``, as backward does.

        Args:
            weights: one number per sample, or a function that computes them from the norms. If samples are on several
                ranks, numbers are for this rank's samples, and a function gets the norms of all of them, in rank
                order; the sum is over all samples.
        """
        with self._asked("weighted_", self._ranks):
            if callable(weights):
                self._keep_what_pays()
                agreed = self._handshake("weighted_ with a function", sparse=self._sparse())
                lengths, order = self._lengths(), self._ranks.order(self._samples)
                self._owe_agreement_on_weights()
                found = weights(self._ranks.gather(lengths, order).to(self._dtype))
                check_weights(found, agreed.total)
                if self._ranks.copies:  # a function may draw numbers, and ranks with the same samples draw others
                    self._handshake("weighted_ with what its function returned", alike=found)
                weights = self._tensor.shard_of_first(found[order.mine], None)
            else:
                check_weights(weights, self._samples)
                agreed = self._handshake("weighted_", sparse=self._sparse(), alike=weights)
            chosen = weights.detach() if weights.is_floating_point() else weights.double()
            self._write(agreed, weigher(self._forms, dict.fromkeys(self._forms, chosen)))

    @untraced
    def clip_(
        self,
        max_norm: float | Tensor,
        *,
        per_parameter: bool = False,
        gamma: float | None = None,
        divide_by: float | None = None,
        noise_multiplier: float = 0.0,
        generator: torch.Generator | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> Tensor:
        """Add the mean of the clipped gradients to each parameter's ``.grad``.

        If samples are on several ranks, the mean is over all of them, and all ranks get the same gradient.

        Each sample's gradient is multiplied by ``min(1, max_norm / norm)``. Adding or removing one sample then
        changes the sum of the clipped gradients by at most ``max_norm``, or by ``max_norm * sqrt(k)`` with
        `per_parameter` and k parameters. This is the sensitivity in differential privacy.

        Args:
            max_norm: the largest norm allowed for a sample, a number or a tensor such as a quantile of
                ``norms(gathered=True)``.
            per_parameter: clip each parameter's gradient by its own norm.
            gamma: multiply by ``max_norm / (norm + gamma)`` instead, also gradients below ``max_norm`` ("automatic"
                clipping); 0 normalises. A zero gradient stays zero.
            divide_by: divide the sum by this, instead of by the number of samples (on all ranks). Differentially
                private training divides by the expected number.
            noise_multiplier: add normal noise to the sum, for every parameter, used or not. Its standard deviation is
                this number times the sensitivity.
            generator: the generator for the noise. With several ranks the first rank draws it, once for all.
            nonfinite: what to do with a sample whose norm is NaN or infinite: "raise" an error and change nothing, or
                "drop" the sample.

        Returns:
            The norms before clipping of this rank's samples, shape (samples,).

        Raises:
            NonFiniteGradientError: a norm is NaN or infinite, on any rank; nothing was changed.
            ArgumentError: `max_norm` or `divide_by` is not positive, `gamma` or `noise_multiplier` is negative, or one
                of them is infinite (`max_norm` may be infinite if the others are not given).
            InplaceModifiedError: something that the gradients depend on was changed in place; nothing was written.
            RankError: ranks passed different arguments or parameters, or one of them did not call this.
        """
        with self._asked("clip_", self._ranks, lengths=True):
            settings = ClipSettings.checked(
                max_norm, per_parameter, gamma, divide_by, noise_multiplier, generator, nonfinite
            )
            self._keep_what_pays()
            total = self._lengths()
            good = None if all_finite(total) else torch.isfinite(total)
            bad = 0 if good is None else int((~good).sum())
            factor_of = self._clip_factors(settings, total, good)
            agreed = self._handshake("clip_", settings.same(), bad=bad, sparse=self._sparse())
            if not settings.drop and agreed.bad:
                raise NonFiniteGradientError(nonfinite_message(torch.isfinite(total), agreed, self._ranks))
            divisor = settings.divide_by or max(1, agreed.total)
            weights = {n: factor / divisor for n, factor in factor_of.items()}
            weights = weights if settings.per_parameter else dict.fromkeys(self._forms, weights[""])
            weigh = weigher(self._forms, weights, good)
            deviation = settings.deviation(len(self._parameters), self._scale / divisor)
            self._write(agreed, weigh, deviation, generator)
        return total.to(self._dtype, copy=True)

    def _owe_agreement_on_weights(self) -> None:
        """Note that ranks with the same samples wait for what the function of this one returns."""
        if self._ranks.copies and self._owed is not None:
            self._owed.ranks = self._ranks

    def _clip_factors(self, settings: ClipSettings, total: Tensor, good: Tensor | None) -> dict[str, Tensor]:
        """Return what each sample is multiplied by: for each parameter, or by the name "" for all of them."""
        each = {name: self._unscaled(n) for name, n in self._norms().each.items()} if settings.per_parameter else {}
        found = {n: factors(norms, settings.max_norm, settings.gamma) for n, norms in (each or {"": total}).items()}
        # A sample without a finite norm gets no weight, whatever its other norms are.
        return found if good is None else {n: factor.where(good, 0) for n, factor in found.items()}

    def _write(
        self,
        agreed: Handshake,
        weigh: Callable[[str], Tensor],
        deviation: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        refuse_unreached(self._parameters, any(agreed.used), agreed.total)
        noise = deviation if self._ranks.is_first else 0.0
        wanted = [used or bool(deviation) for used in agreed.used]
        sums = local_sums(
            self._leaves, self._parameters, wanted, self._forms.keys(), weigh, noise, generator, self._tensor
        )
        with unchanged_weights():
            totals = add_up(sums, self._ranks, self._layouts())
        for name, total in totals:
            accumulate(self._parameters[name], total)

    def _keep_what_pays(self) -> None:
        """Write down, within the budget, what is needed twice: for the norms and for the sum after them."""
        if self._known is not None:
            return
        pays = {name: form.flops_saved for name, form in self._forms.items()}
        per_byte = {name: saved / max(1, prod(self._forms[name].shape)) for name, saved in pays.items() if saved > 0}
        if not per_byte:
            return
        left = self._budget
        # Saving only a Gram is worth no more memory, while the graph is kept as well, than training takes anyhow: for
        # parameters, gradients and the two states of Adam.
        for_grams = 4 * sum([stored_shard(p).nbytes for p in self._parameters.values()])
        for name in sorted(per_byte, key=lambda name: -per_byte[name]):
            form = self._forms[name]
            size, is_gram = form.nbytes(), form.strategy == "gram"
            if size <= (min(left, for_grams) if is_gram else left):
                left -= size
                for_grams -= size if is_gram else 0
                self._forms[name] = Dense(form.dense())
                self._watch.renew(name, self._forms[name])

    def _sparse(self) -> int:
        """Return how many gradients would be written as sparse tensors."""
        return sum(form.is_sparse for form in self._forms.values())
