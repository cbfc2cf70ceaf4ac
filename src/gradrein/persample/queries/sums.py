"""Norms and sums over samples: small gradients side by side, what each is multiplied by, and the way into ``.grad``."""

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from ..._measure import shares_memory
from ..._torch.ops import foreach_copy
from ..._validate import finite, real
from ...errors import ArgumentError, InplaceModifiedError
from .. import tracing
from ..representations.base import Dense, SampleGrads
from ..representations.numerics import double, row_norms, weighted_sum

# The gradients of a parameter are small if writing them takes about as long as a few calls of torch: on the host, and
# on a device, where a kernel is launched in the time that it takes to write some megabytes.
_SMALL_ON_HOST, _SMALL_ON_DEVICE = 1 << 16, 1 << 22
_MAX_NORM = "clip_: max_norm is one number, as in clip_(1.0)"


def refuse_changed(versions: Mapping[str, Sequence[tuple[Tensor, int]]]) -> None:
    """Refuse to answer if anything was changed in place that answers are made of.

    A change through ``.data`` or from outside torch leaves the version as it was, and is not seen here nor by autograd.

    Args:
        versions: for each parameter, tensors with the version of each at the call.
    """
    for name, held in versions.items():
        for tensor, version in held:
            if tensor._version != version:
                raise InplaceModifiedError(
                    f"per_sample: a tensor of shape {tuple(tensor.shape)} that the gradients of `{name}` depend on was "
                    f"changed in place since per_sample was called: it is at version {tensor._version}; expected "
                    f"version {version} instead. It is an input or an activation of the op that uses `{name}`, or what "
                    "grads() or stream() returned. Query before the change, or change a copy.",
                    (name,),
                )


def read_clip_settings(max_norm: Any, per_parameter: Any, gamma: Any, divide_by: Any, nonfinite: Any) -> dict[str, Any]:
    """Return the arguments of `PerSample.clip_`, which every rank has to be given alike, or refuse them."""
    if nonfinite not in ("raise", "drop"):
        raise ArgumentError(f"clip_: nonfinite must be 'raise' or 'drop', found {nonfinite!r}.")
    is_traced = tracing.is_traced() and isinstance(max_norm, Tensor)  # a tensor stands for its number
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


class Joint:
    """Small gradients of several parameters as columns of one matrix: one norm and one product serve all of them.

    Attributes:
        forms: the same gradients, of each parameter.
        nbytes: how many bytes the matrix takes, about.
    """

    def __init__(self, forms: Mapping[str, SampleGrads], budget: int) -> None:
        """Write down those that are small, real, not sparse and on one device, within a budget of bytes."""
        self.nbytes = 0
        blocks: dict[str, Tensor] = {}
        for name, form in forms.items():
            size, held = form.nbytes(), form.held_tensors
            limit = _SMALL_ON_HOST if not held or held[0].is_cpu else _SMALL_ON_DEVICE
            if size <= min(limit, budget - self.nbytes) and not form.is_sparse:
                block = form.dense()
                elsewhere = blocks and block.device != next(iter(blocks.values())).device
                if not block.is_complex() and not elsewhere:
                    blocks[name] = block.reshape(len(block), prod(form.shape))
                    self.nbytes += size
        self._rows = torch.cat(list(blocks.values()), 1) if blocks else torch.empty(0, 0)
        self._sizes = [block.shape[1] for block in blocks.values()]
        self.forms = {
            name: Dense(columns.view(len(columns), *forms[name].shape))
            for name, columns in zip(blocks, torch.split(self._rows, self._sizes, 1) if blocks else (), strict=True)
        }

    def norms(self) -> Tensor:
        """Return the norm of each sample's gradient, of all parameters together."""
        return row_norms(self._rows)

    def weighted(self, weights: Tensor) -> dict[str, Tensor]:
        """Return, for each parameter, the sum over samples of weight times gradient: tensors of their own."""
        if not self.forms:
            return {}
        parts = torch.split(weighted_sum(self._rows, weights), self._sizes)
        shaped = [part.view(form.shape) for part, form in zip(parts, self.forms.values(), strict=True)]
        return dict(zip(self.forms, foreach_copy(shaped), strict=True))


def keep_what_pays(
    forms: Mapping[str, SampleGrads], joint: Joint, budget: int, parameters: int
) -> dict[str, SampleGrads]:
    """Write down gradients that are needed twice: for the norms and for the sum after them.

    Args:
        forms: the gradients.
        joint: those of them that are written down already.
        budget: how many bytes may be taken.
        parameters: how many bytes the parameters take.

    Returns:
        Those that were written down.
    """
    pays = {name: form.flops_saved for name, form in forms.items() if name not in joint.forms}
    per_byte = {name: saved / max(1, prod(forms[name].shape)) for name, saved in pays.items() if saved > 0}
    # Saving only a Gram is worth no more memory, while the graph is kept as well, than training takes anyhow: for
    # parameters, gradients and the two states of Adam.
    budget, for_grams = budget - joint.nbytes, 4 * parameters
    kept: dict[str, SampleGrads] = {}
    for name in sorted(per_byte, key=lambda name: -per_byte[name]):
        form = forms[name]
        size, is_gram = form.nbytes(), form.strategy == "gram"
        if size <= (min(budget, for_grams) if is_gram else budget):
            budget -= size
            for_grams -= size if is_gram else 0
            kept[name] = Dense(form.dense())
    return kept


def weighted_sums(
    forms: Mapping[str, SampleGrads], joint: Joint, weights: Tensor | Mapping[str, Tensor], good: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the sum over samples of weight times gradient, for each parameter.

    Args:
        forms: the gradients.
        joint: those of them that are written down side by side.
        weights: the weight of each sample, for all parameters or for each.
        good: which samples are summed; all by default.
    """
    sums = joint.weighted(weights) if isinstance(weights, Tensor) and good is None else {}
    for name, form in forms.items():
        if name not in sums:
            own = weights if isinstance(weights, Tensor) else weights[name]
            sums[name] = form.weighted(own) if good is None else _finite_weighted(form, own, good)
    return sums


def _finite_weighted(form: SampleGrads, weights: Tensor, good: Tensor) -> Tensor:
    """Weigh and sum some samples; one that is left out must not come back as zero times NaN."""
    total = torch.zeros(form.shape, dtype=torch.float64, device=good.device)
    for i in good.nonzero().squeeze(1).tolist():
        total = total + double(form.dense(slice(i, i + 1))[0]) * weights[i]
    return total


def complete(
    sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor], wanted: Sequence[bool]
) -> list[tuple[str, Tensor]]:
    """Return the sum for each parameter that is wanted, zeros where no loss here depends on it.

    Args:
        sums: those of parameters that losses depend on.
        parameters: sums are in their dtype, and in float32 at least.
        wanted: for each, whether there is to be a sum.
    """
    totals = []
    for (name, parameter), want in zip(parameters.items(), wanted, strict=True):
        if want:
            total = sums.get(name)
            if total is None:
                total = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if total.dtype != parameter.dtype or total.dtype != torch.float32:
                total = total.to(torch.promote_types(parameter.dtype, torch.float32))
            totals.append((name, total))
    return totals


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
            parameter.grad = gradient if gradient.is_sparse else gradient.contiguous()
        else:
            with torch.no_grad():
                parameter.grad = before.add_(gradient) if _is_writable(before) else _sum(before, gradient)


def _is_writable(grad: Tensor) -> bool:
    """Return whether a gradient can be added to in place: of several parameters, no write may fail after others."""
    if grad.is_sparse or (grad.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return grad.is_contiguous() or not shares_memory(grad)


def _sum(before: Tensor, gradient: Tensor) -> Tensor:
    return before + gradient if gradient.is_sparse else gradient + before  # torch adds no dense tensor to a sparse one
