"""Per-sample gradients of a batch, and what can be computed from them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .._torch.dtensor import is_dtensor
from ..errors import ArgumentError, NonFiniteGradientError, UnusedInputError
from . import tracing
from ._audit import Audit, audit
from ._held_versions import HeldVersions
from ._noise_stats import Stats, numbers_of
from ._parameters import ParameterForms, distribute_like
from ._ranks import Handshake, SampleRanks
from ._reduce import add_up, factors, finite_weighted, local_sums, nonfinite_message
from .accumulate import accumulate
from .ownership.find import Source
from .representations.base import Dense, SampleGrads
from .representations.norms import Norms
from .representations.numerics import double, real_dtype, row_norms
from .tracing import all_hold

Weights = Tensor | Callable[[Tensor], Tensor]


class PerSample:
    """The gradients of a batch, one per sample, written down only where a question needs it.

    Made by `per_sample`. It holds on to the recorded graph, so let it go when done.
    """

    def __init__(
        self,
        samples: int,
        parameter_forms: ParameterForms,
        forms: dict[str, SampleGrads],
        *,
        ranks: SampleRanks,
        memory_budget: int,
        scale: float,
        source: Source | None,
        eps: float,
        engine: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        self._samples, self._parameters, self._forms = samples, parameter_forms.held, forms
        self._leaves, self._gathered, self._ranks = parameter_forms.leaves, parameter_forms.gathered, ranks
        self._budget, self._scale, self._source, self._engine = memory_budget, scale, source, engine
        self._eps = eps
        self._watch = HeldVersions(forms)
        self._known: Norms | None = None

    def __len__(self) -> int:
        """Return the number of samples, or of groups."""
        return self._samples

    @overload
    def norms(self, *, per_parameter: Literal[False] = False, gathered: bool = False) -> Tensor: ...
    @overload
    def norms(self, *, per_parameter: Literal[True], gathered: bool = False) -> dict[str, Tensor]: ...
    def norms(self, *, per_parameter: bool = False, gathered: bool = False) -> Tensor | dict[str, Tensor]:
        """Return the norm of each sample's gradient.

        Args:
            per_parameter: return one tensor for each parameter instead.
            gathered: return those of the samples on all ranks, in the order of ranks. Every rank has to ask.

        Returns:
            A tensor of shape (samples,), or a dict of them. Parameters that no loss depends on are left out.
        """
        if per_parameter:
            lengths = {name: self._unscaled(length) for name, length in self._norms().each.items()}
            lengths = self._of_all_ranks(lengths) if gathered else lengths
            return {name: length.to(real_dtype(self._parameters[name].dtype)) for name, length in lengths.items()}
        length = self._lengths()
        if gathered:
            length = self._ranks.gather(length, self._handshake("norms"))
        return length.to(self._dtype())

    def grads(self) -> dict[str, Tensor]:
        """Return every sample's gradient, written down: name -> (samples, *shape)."""
        return {name: block for name, _, block in self.stream()}

    def stream(self, *, samples: int | None = None) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield the gradients parameter by parameter, so that never more than one is written down.

        Args:
            samples: at most this many samples at a time; all by default.

        Yields:
            The parameter's name, which samples, and their gradients: (samples, *shape).
        """
        step = max(1, self._samples) if samples is None else samples
        if step < 1:
            raise ArgumentError(f"stream: samples must be at least 1, found {samples}.")
        with self._asked():
            for name, form in self._forms.items():
                for start in range(0, max(1, self._samples), step):
                    self._watch.check()
                    part = slice(start, min(start + step, self._samples))
                    yield name, part, self._unscaled(form.dense(part)).to(self._parameters[name].dtype)

    def weighted_(self, weights: Weights) -> None:
        """Add the weighted sum of the samples' gradients to each parameter's ``.grad``, as backward would.

        Args:
            weights: one number per sample, or a function that makes them from the norms. Where samples lie on several
                ranks, numbers are for this rank's samples, and a function is given the norms of all of them, in the
                order of ranks; the sum is over all.
        """
        with self._asked():
            if callable(weights):
                self._keep_what_pays()
                lengths = self._lengths()
                agreed = self._handshake("weighted_ with a function", sparse=self._sparse())
                found = weights(self._ranks.gather(lengths, agreed).to(self._dtype()))
                self._require_one_each(found, agreed.total)
                weights = found[agreed.mine]
            else:
                self._require_one_each(weights, self._samples)
                agreed = self._handshake("weighted_", sparse=self._sparse())
            chosen = weights.detach() if weights.is_floating_point() else weights.double()
            self._write(agreed, lambda name: self._forms[name].weighted(chosen))

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

        Where samples lie on several ranks the mean is over all of them, and all ranks get the same gradient.

        Each sample's gradient is multiplied by ``min(1, max_norm / norm)``. One sample more or less then
        changes the sum of the clipped gradients by at most ``max_norm``, or by ``max_norm * sqrt(k)`` with
        `per_parameter` and k parameters: the sensitivity that private training counts with.

        Args:
            max_norm: the largest norm a sample may have. A quantile of ``norms(gathered=True)`` will do as well.
            per_parameter: clip each parameter's gradient by its own norm.
            gamma: multiply by ``max_norm / (norm + gamma)`` instead, also what is short ("automatic"
                clipping); 0 normalises. A gradient of zeros stays one.
            divide_by: divide the sum by this, rather than by the number of samples (on all ranks). Private training
                divides by the expected number.
            noise_multiplier: add to the sum normal noise with this times the sensitivity as its standard
                deviation, to every parameter, used or not.
            generator: where the noise comes from. Over several ranks the first draws it, once for all.
            nonfinite: what to do about a sample whose norm is NaN or infinite: "raise" an error and change nothing, or
                "drop" the sample.

        Returns:
            The norms before clipping of this rank's samples, shape (samples,).

        Raises:
            NonFiniteGradientError: a norm is NaN or infinite, on any rank; nothing was changed.
            ArgumentError: `max_norm` is not positive, or `gamma`, `divide_by` or `noise_multiplier` is negative.
            InplaceModifiedError: something that the gradients are made of was changed in place; nothing was changed.
            RankError: the ranks were given different arguments or parameters, or one of them did not come.
        """
        if nonfinite not in ("raise", "drop"):
            raise ArgumentError(f"clip_: nonfinite must be 'raise' or 'drop', found {nonfinite!r}.")
        limit: Any = tracing.number(max_norm)
        if not all_hold(limit > 0):
            raise ArgumentError(f"clip_: max_norm must be positive, found {limit}.")
        if not noise_multiplier >= 0 or (divide_by is not None and not divide_by > 0):
            raise ArgumentError("clip_: noise_multiplier must not be negative and divide_by must be positive.")
        if gamma is not None and not gamma >= 0:
            raise ArgumentError(f"clip_: gamma must not be negative, found {gamma}.")
        if (gamma is not None or noise_multiplier) and not all_hold(limit < torch.inf):
            raise ArgumentError("clip_: max_norm must be finite where gamma or noise is multiplied by it, found inf.")
        same = {
            "max_norm": limit,
            "per_parameter": per_parameter,
            "gamma": -1 if gamma is None else gamma,
            "divide_by": -1 if divide_by is None else divide_by,
            "noise_multiplier": noise_multiplier,
            "nonfinite": nonfinite == "drop",
        }
        with self._asked():
            self._keep_what_pays()
            total = self._lengths()
            good = torch.isfinite(total)
            each = self._norms().each if per_parameter else dict.fromkeys(self._forms, self._norms().total)
            # A sample without a finite norm gets no weight, whatever its other norms are.
            weights = {name: factors(self._unscaled(n), limit, gamma).where(good, 0) for name, n in each.items()}
            bad = 0 if all_hold(good) else int((~good).sum())
            agreed = self._handshake("clip_", same, bad=bad, sparse=self._sparse())
            if nonfinite == "raise" and any(agreed.bad):
                raise NonFiniteGradientError(nonfinite_message(good, agreed))
            divisor = float(divide_by if divide_by is not None else max(1, agreed.total))

            def weigh(name: str) -> Tensor:
                return finite_weighted(self._forms[name], weights[name] / divisor, good)

            sensitivity = limit * (len(self._parameters) ** 0.5 if per_parameter else 1)
            deviation = noise_multiplier * sensitivity * self._scale / divisor if noise_multiplier else 0.0
            self._write(agreed, weigh, deviation, generator)
        return total.to(self._dtype())

    def dot(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the inner product of each sample's gradient with a direction.

        A complex parameter counts as its real and imaginary parts: the product is the real part of ``conj(g) * v``.

        Args:
            direction: name -> tensor of the parameter's shape; names left out count as zero. Without it, the
                mean gradient.
        """
        chosen = self._local_mean() if direction is None else self._checked(direction)
        return self._dot(chosen).to(self._dtype())

    def cosine(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the cosine between each sample's gradient and a direction, by default the mean gradient."""
        chosen = self._local_mean() if direction is None else self._checked(direction)
        lengths = [row_norms(double(v)[None]) for v in chosen.values()]
        length = row_norms(torch.stack(lengths, 1))[0] if lengths else torch.ones((), dtype=torch.float64)
        unit = {name: double(v) / length.where(length > 0, 1) for name, v in chosen.items()}
        own = self._lengths()
        return (self._dot(unit) / own.where(own > 0, 1)).to(self._dtype())

    def gram(self) -> Tensor:
        """Return the inner products between all samples' gradients: (samples, samples)."""
        with self._asked():
            parts = [form.gram() for form in self._forms.values()]
        total = torch.stack(parts).sum(0) if parts else torch.zeros(self._samples, self._samples)
        return self._unscaled(self._unscaled(total)).to(self._dtype())

    def stats(self, *, gathered: bool = False) -> Stats:
        """Return how large the gradients are, how they agree, and how large a batch would pay.

        Args:
            gathered: of the samples on all ranks. Every rank has to ask.

        Raises:
            ArgumentError: there are fewer than two samples.
        """
        return Stats(*self._stats(self._ranks if gathered else self._ranks.alone()).tolist())

    def _stats(self, ranks: SampleRanks) -> Tensor:
        with self._asked():
            lengths = self._lengths()
            agreed = self._handshake("stats", ranks=ranks)
            n = agreed.total
            if n < 2:
                raise ArgumentError(f"stats: at least two samples are needed, found {n}.")
            mean = self._mean(agreed, ranks)
            lengths, cosines = ranks.gather(torch.stack([lengths, self.cosine(mean).double()], 1), agreed).T
        return numbers_of(lengths, cosines, mean.values())

    def audit(self, *, tolerance: float | None = None) -> Audit:
        """Prove on this very step that nothing was missed and every sample got its own gradient.

        Costs two ordinary backward passes. Weighted sums of the per-sample gradients are compared with the
        gradient of the weighted losses, as autograd computes it, for every parameter.

        Args:
            tolerance: largest relative error to accept; by default what the dtype can give.

        Returns:
            The errors found, all within the tolerance.

        Raises:
            AuditError: a parameter was missed, or its gradients do not add up.
        """
        eps = max((torch.finfo(p.dtype).eps for p in self._parameters.values()), default=0.0)
        eps = max(eps, self._eps)
        if tolerance is None:
            tolerance = 5e-2 if eps > 1e-5 else 1e-3
        names = list(self._parameters)
        with self._asked():
            return audit(self._samples, names, self._forms, self._engine, tolerance, min(eps, 1e-7))

    def plan(self) -> str:
        """Return, for each parameter, in which form its gradients are held and asked."""
        width = max((len(name) for name in self._parameters), default=0)
        source = "nobody else's" if self._source is None else self._source.value
        lines = [f"{self._samples} samples, owners {source}"]
        for name in self._parameters:
            strategy = self._forms[name].strategy if name in self._forms else "unused: no loss depends on it"
            lines.append(f"{name:<{width}}  {strategy}")
        return "\n".join(lines)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Answer a question, if all it needs is as it was."""
        self._watch.check()
        with self._gathered():
            yield

    def _norms(self) -> Norms:
        if self._known is None:
            with self._asked():
                large = (torch.float64, torch.complex128)
                extreme = frozenset(name for name, p in self._parameters.items() if p.dtype in large)
                self._known = Norms(self._forms, self._samples, extreme)
        return self._known

    def _lengths(self) -> Tensor:
        """Return the norm of each sample's gradient on this rank, in float64."""
        return self._unscaled(self._norms().total)

    def _dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the inner products in float64; a direction of any size is brought to a size that can be multiplied."""
        parts = []
        with self._asked():
            for name, v in direction.items():
                if name in self._forms:
                    size = row_norms(v.detach()[None])[0]
                    size = size.where((size > 0) & (size < torch.inf), 1)
                    parts.append(self._forms[name].dot(double(v.detach()) / size) * size)
        total = torch.stack(parts).sum(0) if parts else torch.zeros(self._samples, dtype=torch.float64)
        return self._unscaled(total)

    def _of_all_ranks(self, lengths: dict[str, Tensor]) -> dict[str, Tensor]:
        agreed = self._handshake("norms of each parameter")
        names = [name for name, used in zip(self._parameters, agreed.used, strict=True) if used]
        each = torch.zeros(self._samples, len(names), dtype=torch.float64, device=self._ranks.device)
        for i, name in enumerate(names):
            each[:, i] = lengths.get(name, 0)
        return dict(zip(names, self._ranks.gather(each, agreed).T, strict=True)) if names else {}

    def _handshake(
        self,
        call: str,
        same: Mapping[str, float] | None = None,
        *,
        bad: int = 0,
        sparse: int = 0,
        ranks: SampleRanks | None = None,
    ) -> Handshake:
        used = [name in self._forms for name in self._parameters]
        settings = {"the scale of `scaler`": self._scale, **(same or {})}
        return (ranks or self._ranks).handshake(call, self._parameters, used, (self._samples, bad, sparse), settings)

    def _sparse(self) -> int:
        """Return how many gradients would be written as sparse tensors."""
        return sum(form.is_sparse for form in self._forms.values())

    def _require_one_each(self, weights: Tensor, count: int) -> None:
        if not isinstance(weights, Tensor):
            raise ArgumentError(
                f"weighted_: expected a tensor with one weight per sample, found {type(weights).__name__}."
            )
        if tuple(weights.shape) != (count,):
            raise ArgumentError(
                f"weighted_: expected one weight per sample, shape ({count},), found {tuple(weights.shape)}."
            )

    def _write(
        self,
        agreed: Handshake,
        weigh: Callable[[str], Tensor],
        deviation: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        refuse_unreached(self._parameters, [used for used in agreed.used if used], agreed.total)
        noise = deviation if self._ranks.is_first else 0.0
        wanted = [used or bool(deviation) for used in agreed.used]
        sums = local_sums(self._leaves, self._parameters, wanted, self._forms.keys(), weigh, noise, generator)
        for name, total in add_up(
            sums, self._ranks, lambda name, total: distribute_like(self._parameters[name], total)
        ):
            accumulate(self._parameters[name], total)

    def _keep_what_pays(self) -> None:
        """Write down, within the budget, what is needed twice: for the norms and for the sum after them."""
        if self._known is not None:
            return
        left = self._budget
        ranked = sorted(self._forms.items(), key=lambda item: -item[1].flops_saved() / max(1, prod(item[1].shape)))
        for name, form in ranked:
            # Saving only a Gram is not worth the memory while the graph is kept as well.
            if form.strategy != "gram" and form.flops_saved() > 0 and form.nbytes() <= left:
                left -= form.nbytes()
                self._forms[name] = Dense(form.dense())
                self._watch.renew(name, self._forms[name])

    def _mean(self, agreed: Handshake, ranks: SampleRanks) -> dict[str, Tensor]:
        weights = torch.full((self._samples,), 1 / max(1, agreed.total), dtype=torch.float64)

        def weigh(name: str) -> Tensor:
            total = self._forms[name].weighted(weights)
            return self._unscaled(total.to_dense() if total.is_sparse else total)

        with self._asked():
            sums = local_sums(self._leaves, self._parameters, agreed.used, self._forms.keys(), weigh)
            return dict(add_up(sums, ranks))

    def _local_mean(self) -> dict[str, Tensor]:
        alone = self._ranks.alone()
        return self._mean(self._handshake("mean", ranks=alone), alone)

    def _checked(self, direction: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, v in direction.items():
            if name not in self._parameters:
                raise ArgumentError(f"direction: there is no parameter called {name!r}.")
            if is_dtensor(v):
                raise ArgumentError(f"direction: {name!r} is a DTensor. Pass the whole of it: full_tensor().")
            if v.shape != self._parameters[name].shape:
                raise ArgumentError(
                    f"direction: {name!r} has shape {tuple(v.shape)}, its parameter "
                    f"{tuple(self._parameters[name].shape)}."
                )
            if v.is_complex() and not self._parameters[name].is_complex():
                raise ArgumentError(f"direction: {name!r} is complex, its parameter is real.")
        return direction

    def _unscaled(self, x: Tensor) -> Tensor:
        return x if self._scale == 1 else x / self._scale

    def _dtype(self) -> torch.dtype:
        dtypes = [real_dtype(p.dtype) for p in self._parameters.values()]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def refuse_unreached(parameters: Collection[str], reached: Collection[object], samples: int) -> None:
    """Refuse losses that depend on none of the parameters: probably they are those of another model."""
    if reached or not samples:
        return
    if not parameters:
        raise ArgumentError("per_sample: there is no parameter that needs a gradient.")
    names = tuple(parameters)
    some = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    raise UnusedInputError(
        f"per_sample: the losses depend on none of the parameters ({some}). Were they computed by another model, or by "
        "a copy of this one?",
        names,
    )
