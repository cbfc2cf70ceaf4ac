"""What `per_sample` returns."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Literal, TypeAlias, overload

import torch
from torch import Tensor

from ..._notebook import Lines, card, histogram
from ..._torch.dynamo import untraced
from ..._torch.modes import default_modes
from ..._validate import count, finite
from ...errors import ArgumentError, ArgumentTypeError, GradreinError, InplaceModifiedError, NonFiniteGradientError
from ..engine import Losses
from ..gate.arguments import check_weights, read_direction, read_scales
from ..gate.ranks import Agreed, ParameterViews
from ..representations.base import SampleGrads
from ..representations.numerics import double, narrowed, real_dtype, row_norms
from ..tracing import all_hold
from .audit import Audit, audit
from .project import Projection, along, cross_products, fingerprint, plain_names
from .stats import Stats, numbers_of
from .sums import (
    BatchGrads,
    accumulate,
    factors,
    read_clip_settings,
    refuse_overflow,
)

Weights: TypeAlias = Tensor | Callable[[Tensor], Tensor]
# Factors between these bounds are exact in float32 also when they are divided by some number of samples.
_ORDINARY = 1e24


class PerSample:
    """The gradients of a batch, one per sample. They are materialised only where a query needs it.

    Created by `per_sample`. It keeps the recorded graph alive: delete it when done.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> ps = gradrein.per_sample(model(x).sum(1), model)
        >>> ps.norms()
        tensor([5., 1.])

    See Also:
        [`gradrein.per_sample`][]
    """

    def __init__(
        self,
        grads: BatchGrads,
        *,
        source: str | None,
        losses: Losses | None,
        parameters: ParameterViews,
        agree: Callable[..., Agreed],
        scale: float,
    ) -> None:
        """Hold the gradients of a batch.

        Args:
            grads: those of each parameter that the losses depend on.
            source: how owners were found; None where there is nothing to find.
            losses: what was differentiated; None where its graph is not kept.
            parameters: where they are.
            agree: compares a query with those of the ranks whose samples belong together.
            scale: what losses were multiplied by.
        """
        self._grads, self._source, self._losses, self._views = grads, source, losses, parameters
        self._agree_on, self._scale = agree, scale
        self._weights = [p._version for p in parameters.held.values()]

    def __len__(self) -> int:
        """Return the number of samples, or of groups."""
        return self._grads.samples

    def __repr__(self) -> str:
        return f"PerSample({len(self)} samples, {len(self._views.held)} parameters)"

    @overload
    def norms(self, *, per_parameter: Literal[False] = False, gathered: bool = False) -> Tensor: ...
    @overload
    def norms(self, *, per_parameter: Literal[True]) -> dict[str, Tensor]: ...
    @untraced
    def norms(self, *, per_parameter: bool = False, gathered: bool = False) -> Tensor | dict[str, Tensor]:
        """Return the norm of each sample's gradient.

        Args:
            per_parameter: return one tensor for each parameter instead.
            gathered: return the norms of the samples on all ranks, in rank order. Every rank has to call this. Not
                for each parameter.

        Returns:
            A tensor of shape (samples,), or a dict of them. Parameters that no loss depends on are left out.
        """
        if per_parameter and gathered:
            raise ArgumentError("norms: of all ranks there are the norms of whole samples. Pass gathered=True alone.")
        with nullcontext() if self._grads.has_norms else self._query():
            if per_parameter:
                dtypes = {name: real_dtype(p.dtype) for name, p in self._views.held.items()}
                each = self._grads.norms_of_each.items()
                return {name: self._unscaled(values).to(dtypes[name], copy=True) for name, values in each}
            total = self._unscaled(self._grads.norms())
            if gathered:
                total, _ = self._agree("norms").gather(total)
            return total.to(self._dtype, copy=True)  # the caller may change it, and the next query needs it

    @untraced
    def grads(self) -> dict[str, Tensor]:
        """Return every sample's gradient: name -> (samples, *shape)."""
        return {name: block for name, _, block in self.stream()}

    def stream(self, *, samples: int | None = None) -> Iterator[tuple[str, slice, Tensor]]:
        """Return an iterator over the gradients, parameter by parameter; only one block is in memory at a time.

        Args:
            samples: at most this many samples per block; all by default.

        Returns:
            For each block the parameter's name, which samples, and their gradients: (samples, *shape).
        """
        return self._blocks(max(1, len(self)) if samples is None else count(samples, "samples"))

    @untraced
    def dot(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the inner product of each sample's gradient with a direction.

        A complex parameter counts as its real and imaginary parts: the product is the real part of ``conj(g) * v``.

        Args:
            direction: name -> tensor of the parameter's shape; missing names count as zero. By default the
                mean gradient of this rank's samples.
        """
        with self._query():
            return self._dot(self._direction(direction)).to(self._dtype)

    @untraced
    def cosine(self, direction: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the cosine between each sample's gradient and a direction, by default the mean gradient.

        Args:
            direction: as for `dot`.
        """
        with self._query():
            return self._cosine(self._direction(direction)).to(self._dtype)

    @untraced
    def gram(self) -> Tensor:
        """Return the inner products between all samples' gradients: (samples, samples)."""
        with self._query():
            parts = [grads.gram() for grads in self._by_name.values()]
            total = torch.stack(parts).sum(0) if parts else torch.zeros(len(self), len(self), dtype=torch.float64)
            return self._unscaled(self._unscaled(total)).to(self._dtype)

    @untraced
    def cross(self, other: "PerSample") -> Tensor:
        """Return the inner products between these gradients and those of another batch: (samples, other samples).

        Args:
            other: of the same parameters, such as the gradients of test samples.
        """
        if not isinstance(other, PerSample):
            raise ArgumentTypeError(
                f"cross: expected what per_sample returned for another batch, found {type(other).__name__}. For "
                "gradients of your own use dot(direction)."
            )
        mine, others = ({(name, *p.shape) for name, p in ps._views.held.items()} for ps in (self, other))
        if mine != others:
            raise ArgumentError(
                f"cross: the two batches have different parameters, such as {min(mine ^ others)}. Call per_sample with "
                "the same model for both."
            )
        with self._query(), other._query():
            total = torch.zeros(len(self), len(other), dtype=torch.float64, device=self._device)
            for name, grads in self._by_name.items():
                if name in other._by_name and total.numel():
                    total += cross_products(grads, other._by_name[name]).to(total)
            return other._unscaled(self._unscaled(total)).to(self._dtype)

    @untraced
    def project(
        self,
        size: int,
        *,
        kind: Literal["sparse", "factored"] = "sparse",
        seed: int = 0,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return a short random projection of each sample's gradient, with the same inner products in expectation.

        It depends on the seed and on the names and shapes of the parameters alone: batches, ranks, devices and
        machines give rows that can be compared. What DDP, FSDP and torch.compile add to names does not count.

        Args:
            size: how many numbers a gradient becomes. For "factored" each weight becomes at most ``size * size``.
            kind: "sparse" adds every number of the gradient, with a random sign, to one of `size` sums. "factored"
                multiplies both sides of each weight by random signs (and adds up the matrices of a weight with three
                dimensions); all other parameters share one more block. It is faster; its variance is higher.
            seed: which projection.
            scales: name -> what to multiply the gradient by, number by number; for every parameter.

        Returns:
            A tensor (samples, columns). Its attribute ``projection`` is a dict that says how it was made.

        Raises:
            ArgumentError: `size` is below 1 or above the gradient, the kind is unknown, or `scales` do not fit.
            InplaceModifiedError: the weights have changed.

        Examples:
            >>> model = torch.nn.Linear(50, 20)
            >>> ps = gradrein.per_sample(model(torch.ones(3, 50)).square().sum(1), model)
            >>> ps.project(64, seed=1).shape
            torch.Size([3, 64])
        """
        held, leaves = self._views.held, self._views.leaves
        plain = plain_names(list(held))
        given = {} if scales is None else read_scales(scales, held)
        projection = Projection(size, kind, seed, {plain[name]: tuple(p.shape) for name, p in held.items()})
        of_complex = [name for name, p in held.items() if p.is_complex()]
        if of_complex:
            raise ArgumentError(
                f"project: parameter {of_complex[0]!r} is complex. Pass real ones, such as both parts in one parameter."
            )
        if [p._version for p in held.values()] != self._weights:
            raise InplaceModifiedError("project: weights have changed since. Project before optimizer.step().", ())
        with self._query():
            out = torch.zeros(len(self), projection.columns, dtype=torch.float64, device=self._device)
            grads = {plain[name]: of_one for name, of_one in self._by_name.items()}
            by_name = {plain[name]: scale for name, scale in given.items()}
            projection.apply(grads, by_name, out, self._grads.budget)
            weights = fingerprint({plain[name]: leaf for name, leaf in leaves.items()}, self._device)
            z = self._unscaled(out).to(self._dtype)
        of_scales = fingerprint(by_name, self._device) if scales is not None else None
        # Plain values: what `torch.save` writes of a tensor is read again with weights_only.
        z.__dict__["projection"] = {**projection.describe(), "weights": weights, "scales": of_scales}
        return z

    @untraced
    def stats(self) -> Stats:
        """Return statistics of the gradients: size, agreement, and the batch size that would pay off.

        All of them are NaN if the gradient of a sample is NaN or infinite.

        Raises:
            ArgumentError: there are fewer than two samples.
        """
        with self._query():
            if len(self) < 2:
                raise ArgumentError(f"stats: at least two samples are needed, found {len(self)}.")
            mean, norms = self._mean(), self._unscaled(self._grads.norms())
            numbers = numbers_of(norms, self._cosine(mean), _length(mean) if mean else norms.new_zeros(()))
        return Stats(*numbers.tolist())

    @untraced
    def weighted_(self, weights: Weights) -> None:
        """Add the weighted sum of the samples' gradients to each parameter's ``.grad``, as backward does.

        Args:
            weights: one number per sample, or a function that computes them from the norms. If samples are on several
                ranks, numbers are for this rank's samples, and a function gets the norms of all of them, in rank
                order; the sum is over all samples.
        """
        with self._query():
            if callable(weights):
                total = self._unscaled(self._grads.norms(then_sums=True))
                agreed = self._agree("weighted_ with a function")
                norms, own = agreed.gather(total)
                every = weights(norms.to(self._dtype))
                check_weights(every, agreed.total)
                self._grads.refuse_changed()  # the function may have done anything
                chosen = every[own]
            else:
                check_weights(weights, len(self))
                agreed = self._agree("weighted_")
                chosen = weights
            chosen = chosen.detach() if chosen.is_floating_point() else chosen.double()
            self._write(agreed, self._grads.weighted_sums(chosen if self._grads.is_extreme else narrowed(chosen)))

    @untraced
    def clip_(
        self,
        max_norm: float | Tensor,
        *,
        per_parameter: bool = False,
        gamma: float | None = None,
        divide_by: float | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> Tensor:
        """Add the mean of the clipped gradients to each parameter's ``.grad``.

        If samples are on several ranks, the mean is over all of them, and all ranks get the same gradient.

        Each sample's gradient is multiplied by ``min(1, max_norm / norm)``. Adding or removing one sample then
        changes the sum of the clipped gradients by at most ``max_norm``, or by ``max_norm * sqrt(k)`` with
        `per_parameter` and k parameters. This is the sensitivity in differential privacy; the noise is added by
        `gradrein.private`, once for all parts of a batch.

        Args:
            max_norm: the largest norm allowed for a sample, a number or a tensor such as a quantile of
                ``norms(gathered=True)``.
            per_parameter: clip each parameter's gradient by its own norm.
            gamma: multiply by ``max_norm / (norm + gamma)`` instead, also gradients below ``max_norm`` ("automatic"
                clipping); 0 normalises. A zero gradient stays zero.
            divide_by: divide the sum by this, instead of by the number of samples (on all ranks). Differentially
                private training divides by the expected number.
            nonfinite: what to do with a sample whose norm is NaN or infinite: "raise" an error and change nothing, or
                "drop" the sample.

        Returns:
            The norms before clipping of this rank's samples, shape (samples,).

        Raises:
            NonFiniteGradientError: a norm is NaN or infinite, on any rank; nothing was changed.
            ArgumentError: `max_norm` or `divide_by` is not positive, `gamma` is negative, or one of them is infinite
                (`max_norm` may be infinite if `gamma` is not given).
            InplaceModifiedError: something that the gradients depend on was changed in place; nothing was written.
            RankError: ranks passed different arguments or parameters, or one of them did not call this.
        """
        settings = read_clip_settings(max_norm, per_parameter, gamma, divide_by, nonfinite)
        with self._query():
            total = each = self._unscaled(self._grads.norms(then_sums=True))
            if per_parameter and self._by_name:
                each = self._unscaled(torch.stack(list(self._grads.norms_of_each.values())))
            factor = factors(each, settings["max_norm"], settings["gamma"])
            # One look at the device for both: whether all is finite, and whether float32 can hold the weights.
            is_ordinary = all_hold((factor > 1 / _ORDINARY) & (factor < _ORDINARY))
            good = None if is_ordinary or bool(total.isfinite().all()) else total.isfinite()
            if gamma is not None and not is_ordinary:
                refuse_overflow(factor, each, settings["max_norm"])
            agreed = self._agree("clip_", settings, 0 if good is None else int((~good).sum()))
            if nonfinite == "raise" and agreed.bad:
                raise NonFiniteGradientError(_nonfinite_message(good, agreed))
            divisor = settings["divide_by"] or max(1, agreed.total)
            # A sample without a finite norm gets no weight, whatever its other norms are.
            weights = (factor if good is None else factor.where(good, 0)) / divisor
            if is_ordinary and not self._grads.is_extreme and 1e-6 < divisor < 1e6:
                weights = weights.float()
            by_name = dict(zip(self._by_name, weights, strict=True)) if per_parameter else weights
            self._write(agreed, self._grads.weighted_sums(by_name, good))
        return total.to(self._dtype, copy=True)

    @untraced
    def plan(self) -> str:
        """Return, for each parameter, how its gradients are held, and how samples were told apart."""
        grads, names = self._by_name, self._views.held
        width = max((len(name) for name in names), default=0)
        source = "not needed" if self._source is None else self._source
        lines = [f"{len(self)} samples, told apart: {source}"]
        for name in names:
            strategy = grads[name].strategy if name in grads else "unused: no loss depends on it"
            lines.append(f"{name:<{width}}  {strategy}")
        return Lines("\n".join(lines))

    @untraced
    def audit(self, *, tolerance: float | None = None) -> Audit:
        """Check this step against autograd: that no use was missed and every sample got its own gradient.

        Compares weighted sums of the per-sample gradients with the gradient of the weighted losses, as autograd
        computes it, for every parameter. Costs two ordinary backward passes.

        Args:
            tolerance: largest relative error to accept; by default what the dtype allows.

        Returns:
            The errors found, all within the tolerance.

        Raises:
            AuditError: a parameter was missed, or its gradients do not add up.
            NonFiniteGradientError: the gradient of a sample is NaN or infinite, so the sums cannot be compared.
            GraphFreedError: `per_sample` was called with ``retain_graph=False``.
        """
        with self._query():
            given = None if tolerance is None else finite(tolerance, "audit: tolerance is a number")
            total = self._grads.norms()
            return audit(total, self._grads.norms_of_each, self._views.leaves, self._by_name, self._losses, given)

    def _repr_html_(self) -> str:
        title, picture = f"{len(self)} samples", ""
        try:
            if self._grads.has_norms or self._views.mesh is None:  # else every rank would have to ask
                picture = histogram(self.norms().tolist())
                title += ": how large the gradient of each is"
        except GradreinError as error:
            title += f"; their norms are not known: {error}"
        return card(title, picture, self.plan())

    @contextmanager
    def _query(self) -> Iterator[None]:
        """Answer a query, if all it needs is as it was."""
        with self._views.gathered(), default_modes():
            self._grads.refuse_changed()
            yield

    @property
    def _by_name(self) -> dict[str, SampleGrads]:
        return self._grads.by_name

    def _agree(self, call: str, settings: Mapping[str, float | None] | None = None, bad: int = 0) -> Agreed:
        """Compare this call with those of other ranks, and learn what all of them have."""
        grads, held = self._by_name, self._views.held
        same = {name: -1 if value is None else value for name, value in (settings or {}).items()}
        same |= {"the scale of `scaler`": self._scale}
        return self._agree_on(call, held, [name in grads for name in held], (len(self), bad), same)

    def _blocks(self, step: int) -> Iterator[tuple[str, slice, Tensor]]:
        with self._views.gathered():
            for name, grads in self._by_name.items():
                for start in range(0, max(1, len(self)), step):
                    self._grads.refuse_changed()
                    part = slice(start, min(start + step, len(self)))
                    with default_modes():  # not while the caller has the block
                        block = self._unscaled(grads.dense(part)).to(self._views.held[name].dtype)
                        block = block if block.is_contiguous() else block.contiguous()  # not a part of ours
                    yield name, part, block

    def _direction(self, direction: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        return self._mean() if direction is None else read_direction(direction, self._views.held)

    def _mean(self) -> dict[str, Tensor]:
        dtype = torch.float64 if self._grads.is_extreme else torch.float32
        equal = torch.full((len(self),), 1 / max(1, len(self)), dtype=dtype, device=self._device)
        sums = self._grads.weighted_sums(equal)
        return {name: self._unscaled(total) for name, total in sums.items()}

    def _dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Return the inner products in float64."""
        parts = [along(self._by_name[name], v) for name, v in direction.items() if name in self._by_name]
        total = torch.stack(parts).sum(0) if parts else torch.zeros(len(self), dtype=torch.float64)
        return self._unscaled(total)

    def _cosine(self, direction: Mapping[str, Tensor]) -> Tensor:
        length = _length(direction)
        unit = {name: double(v) / length.where(length > 0, 1) for name, v in direction.items()}
        own = self._unscaled(self._grads.norms())
        return self._dot(unit) / own.where(own > 0, 1)

    def _write(self, agreed: Agreed, sums: dict[str, Tensor]) -> None:
        totals = agreed.add_up(sums, self._views.held)
        accumulate([self._views.held[name] for name in totals], list(totals.values()))

    def _unscaled(self, x: Tensor) -> Tensor:
        return x if self._scale == 1 else x / self._scale

    @property
    def _device(self) -> torch.device:
        return next((leaf.device for leaf in self._views.leaves.values()), torch.device("cpu"))

    @cached_property
    def _dtype(self) -> torch.dtype:
        """The dtype of norms and products of all parameters: that of the widest."""
        dtypes = [real_dtype(dtype) for dtype in {p.dtype for p in self._views.held.values()}]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def _length(direction: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of a direction."""
    each = [row_norms(double(v)[None]) for v in direction.values()]
    return row_norms(torch.stack(each, 1))[0] if each else torch.ones((), dtype=torch.float64)


def _nonfinite_message(good: Tensor | None, agreed: Agreed) -> str:
    """Say which samples have no finite norm."""
    here = "" if good is None else f", the first being sample {(~good).nonzero()[0].item()}"
    return (
        f"clip_: the gradients of {agreed.bad} of {agreed.total} samples are NaN or infinite{here}. "
        "Pass nonfinite='drop' to leave them out."
    )
