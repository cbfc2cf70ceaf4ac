"""Norms and sums over samples: small gradients side by side, what each is multiplied by, and the way into ``.grad``."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ..._measure import shares_memory
from ..._torch.ops import foreach_copy
from ..._validate import finite, real
from ...errors import ArgumentError, InplaceModifiedError
from .. import tracing
from ..representations.base import Dense, SampleGrads, stored
from ..representations.numerics import double, row_norms, total_norms, weighted_sum

# The gradients of a parameter are small if writing them takes about as long as a few calls of torch: on the host, and
# on a device, where a kernel is launched in the time that it takes to write some megabytes.
_SMALL_ON_HOST, _SMALL_ON_DEVICE = 1 << 16, 1 << 22
_MAX_NORM = "clip_: max_norm is one number, as in clip_(1.0)"


def read_clip_settings(max_norm: Any, per_parameter: Any, gamma: Any, divide_by: Any, nonfinite: Any) -> dict[str, Any]:
    """Return the arguments of `PerSample.clip_`, which every rank has to be given alike, or refuse them."""
    if nonfinite not in ("raise", "drop"):
        raise ArgumentError(f"clip_: nonfinite must be 'raise' or 'drop', found {nonfinite!r}.")
    is_traced = isinstance(max_norm, Tensor) and tracing.is_traced()  # a tensor stands for its number
    limit: Any = max_norm.detach().double() if is_traced else real(max_norm, _MAX_NORM)
    if not tracing.all_hold(limit > 0):
        raise ArgumentError(f"clip_: max_norm must be positive, found {limit}.")
    gamma = None if gamma is None else finite(gamma, "clip_: gamma is a number")
    if divide_by is not None:
        divide_by = finite(divide_by, "clip_: divide_by is a number of samples", above_zero=True)
    if gamma is not None and not tracing.all_hold(limit < inf):
        raise ArgumentError("clip_: max_norm must be finite if gamma is given, found inf.")
    settings = {"max_norm": limit, "per_parameter": bool(per_parameter), "gamma": gamma, "divide_by": divide_by}
    return {**settings, "nonfinite": nonfinite == "drop"}


def factors(norms: Tensor, limit: float, gamma: float | None) -> Tensor:
    """Return what each sample's gradient is multiplied by to clip it."""
    if gamma is not None:
        return (limit / (norms + gamma)).where(norms > 0, 0)
    return (limit / norms).clamp(max=1)  # infinity of a zero gradient, which stays as it is


def refuse_overflow(factor: Tensor, norms: Tensor, limit: float) -> None:
    """Refuse gradients that are too small to be brought to a norm."""
    if bool(factor.isinf().any()):
        raise ArgumentError(
            f"clip_: a norm of {float(norms[factor.isinf()][0]):.0e} is too small to be scaled to {limit}. Pass a "
            "larger gamma."
        )


class BatchGrads:
    """The gradients of a batch, of each parameter in its representation; the small ones also side by side.

    Small gradients of several parameters are columns of one matrix: one norm and one product serve all of them.

    Attributes:
        by_name: the gradients of each parameter that the losses depend on.
        samples: how many samples there are.
        budget: how many bytes more may be written down.
        is_extreme: whether float64 may not hold the squares of norms, nor float32 weights that are exact enough.
    """

    def __init__(
        self, by_name: dict[str, SampleGrads], samples: int, parameters: Mapping[str, Tensor], budget: int
    ) -> None:
        """Hold gradients; what is written down takes no more bytes than the budget."""
        self.by_name, self.samples, self.budget = by_name, samples, budget
        self._parameter_bytes = sum([p.nbytes for p in parameters.values()])
        self.is_extreme = any(p.dtype in (torch.float64, torch.complex128) for p in parameters.values())
        self._versions = {name: _versions(grads) for name, grads in by_name.items()}
        self._side_by_side: Tensor | None = None
        self._small: dict[str, SampleGrads] = {}
        self._total: Tensor | None = None

    def refuse_changed(self) -> None:
        """Refuse to answer if anything was changed in place that answers are made of.

        A change through ``.data`` or from outside torch leaves the version as it was, and is not seen here nor by
        autograd.
        """
        for name, versions in self._versions.items():
            for tensor, version in versions:
                if tensor._version != version:
                    raise InplaceModifiedError(
                        f"per_sample: a tensor of shape {tuple(tensor.shape)} that the gradients of `{name}` depend on "
                        f"was changed in place since per_sample was called: it is at version {tensor._version}; "
                        f"expected version {version} instead. It is an input or an activation of the op that uses "
                        f"`{name}`, or what grads() or stream() returned. Query before the change, or change a copy.",
                        (name,),
                    )

    @property
    def has_norms(self) -> bool:
        """Whether the norms are known, and stay right whatever is changed."""
        return self._total is not None

    def norms(self, *, then_sums: bool = False) -> Tensor:
        """Return the norm of each sample. If sums follow, write down what is needed for both, within the budget."""
        if self._total is None:
            self._join_small()
            if then_sums:
                self._store_what_pays()
            self._apart = {name: grads.norms() for name, grads in self.by_name.items() if name not in self._small}
            together = [row_norms(self._side_by_side)] if self._side_by_side is not None else []
            self._total = total_norms([*together, *self._apart.values()], self.samples, extreme=self.is_extreme)
        return self._total

    @cached_property
    def norms_of_each(self) -> dict[str, Tensor]:
        """The norms of each parameter's gradients."""
        self.norms()
        apart = self._apart
        return {name: apart[name] if name in apart else grads.norms() for name, grads in self.by_name.items()}

    def weighted_sums(self, weights: Tensor | Mapping[str, Tensor], good: Tensor | None = None) -> dict[str, Tensor]:
        """Return the sum over samples of weight times gradient, for each parameter: tensors of their own.

        Args:
            weights: the weight of each sample, for all parameters or for each.
            good: which samples are summed; all by default.
        """
        self._join_small()
        sums = self._sums_of_small(weights) if isinstance(weights, Tensor) and good is None else {}
        for name, grads in self.by_name.items():
            if name not in sums:
                own = weights if isinstance(weights, Tensor) else weights[name]
                sums[name] = grads.weighted(own) if good is None else _finite_weighted(grads, own, good)
        return sums

    def _join_small(self) -> None:
        """Write down side by side, once, what is small, real and on one device."""
        if self._side_by_side is not None or self._total is not None:
            return
        blocks: dict[str, Tensor] = {}
        for name, grads in self.by_name.items():
            size, held = grads.nbytes(), grads.held_tensors
            limit = _SMALL_ON_HOST if not held or held[0].is_cpu else _SMALL_ON_DEVICE
            if size <= min(limit, self.budget):
                block = grads.dense()
                elsewhere = blocks and block.device != next(iter(blocks.values())).device
                if not block.is_complex() and not elsewhere:
                    blocks[name] = block.reshape(len(block), prod(grads.shape))
                    self.budget -= size
        if blocks:
            self._side_by_side = torch.cat(list(blocks.values()), 1)
            columns = torch.split(self._side_by_side, [block.shape[1] for block in blocks.values()], 1)
            for name, part in zip(blocks, columns, strict=True):
                self._small[name] = Dense(part.view(len(part), *self.by_name[name].shape))
            self._replace(self._small)

    def _sums_of_small(self, weights: Tensor) -> dict[str, Tensor]:
        if self._side_by_side is None:
            return {}
        sizes = [prod(grads.shape) for grads in self._small.values()]
        parts = torch.split(weighted_sum(self._side_by_side, weights), sizes)
        shaped = [part.view(grads.shape) for part, grads in zip(parts, self._small.values(), strict=True)]
        return dict(zip(self._small, foreach_copy(shaped), strict=True))

    def _store_what_pays(self) -> None:
        """Write down gradients that are needed twice: for the norms and for the sum after them."""
        pays = {name: grads.flops_saved for name, grads in self.by_name.items() if name not in self._small}
        per_byte = {name: saved / max(1, prod(self.by_name[name].shape)) for name, saved in pays.items() if saved > 0}
        # Saving only a Gram is worth no more memory, while the graph is kept as well, than training takes anyhow: for
        # parameters, gradients and the two states of Adam.
        budget, for_grams = self.budget, 4 * self._parameter_bytes
        for name in sorted(per_byte, key=lambda name: -per_byte[name]):
            grads = self.by_name[name]
            is_gram = grads.strategy == "gram"
            limit = min(budget, for_grams) if is_gram else budget
            written, left = stored(grads, limit)
            budget -= limit - left
            for_grams -= limit - left if is_gram else 0
            self._replace({name: written})

    def _replace(self, by_name: Mapping[str, SampleGrads]) -> None:
        """Hold some gradients in another representation from now on."""
        for name, grads in by_name.items():
            self.by_name[name], self._versions[name] = grads, _versions(grads)


def _versions(grads: SampleGrads) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in grads.held_tensors if not tensor.is_inference()]


def _finite_weighted(grads: SampleGrads, weights: Tensor, good: Tensor) -> Tensor:
    """Weigh and sum some samples; one that is left out must not come back as zero times NaN."""
    total = torch.zeros(grads.shape, dtype=torch.float64, device=good.device)
    for i in good.nonzero().squeeze(1).tolist():
        total = total + double(grads.dense(slice(i, i + 1))[0]) * weights[i]
    return total


def accumulate(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add to ``.grad``, as backward would."""
    tracer = tracing.local.tracer
    for parameter, gradient in zip(parameters, gradients, strict=True):
        gradient = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
        before = parameter.grad
        if tracer is not None:
            tracer.add_to_grad(parameter, gradient)
        elif before is None:
            # A parameter may be told to have gradients of another type (torch 2.10).
            wanted = getattr(parameter, "grad_dtype", None) or gradient.dtype
            gradient = gradient if gradient.dtype == wanted else gradient.to(wanted)
            parameter.grad = gradient.contiguous()
        else:
            with torch.no_grad():
                parameter.grad = before.add_(gradient) if _is_writable(before) else gradient + before


def _is_writable(grad: Tensor) -> bool:
    """Return whether a gradient can be added to in place: of several parameters, no write may fail after others."""
    if grad.is_sparse or (grad.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return grad.is_contiguous() or not shares_memory(grad)
