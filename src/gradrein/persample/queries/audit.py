"""The proof, on a live step, that nothing was missed and every sample got its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import graph
from ..._notebook import bars, card, table
from ..._torch.nodes import output_metadata
from ...errors import AuditError, GraphFreedError, NonFiniteGradientError
from .. import engine
from ..engine import Losses
from ..representations.base import SampleGrads
from ..representations.numerics import double, row_norms


@dataclass(frozen=True)
class Audit:
    """What an audit compared, all of it passed.

    Attributes:
        parameters: largest error of each parameter's weighted sum, relative to autograd's own gradient.
        norms: largest relative error of the norms that were computed a second way.
        unused: parameters that no loss depends on, by autograd's own account.
    """

    parameters: dict[str, float]
    norms: float
    unused: tuple[str, ...]

    def _repr_html_(self) -> str:
        rows = {"largest relative error of norms": self.norms, "unused": ", ".join(self.unused) or "none"}
        return card("Passed: relative error of each parameter's sum", bars(self.parameters), "") + table(rows)


def audit(
    total: Tensor,
    each: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    by_name: dict[str, SampleGrads],
    losses: Losses | None,
    tolerance: float | None,
) -> Audit:
    """Compare with the engine under weights that tell every sample from every other.

    A weighted sum of gradients is the gradient of the weighted losses. Were a row given to the wrong sample,
    or a use of a parameter missed, the two would differ for nearly all weights; they are random here, and
    once more all equal.
    """
    if losses is None:
        raise GraphFreedError(
            "audit: the recorded graph was freed, because per_sample was called with retain_graph=False. An audit "
            "needs the graph: call per_sample with retain_graph=True.",
            (),
        )
    _refuse_nonfinite(total)
    samples, dtypes = len(total), {leaf.dtype for leaf in leaves.values()}
    dtypes |= {out.dtype for node in losses.scan.nodes for out in output_metadata(node)}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex), default=0.0)
    tolerance = (5e-2 if eps > 1e-5 else 1e-3) if tolerance is None else tolerance
    sizes = {name: _size(norms) for name, norms in each.items()}
    # A gradient that is zero but for rounding, such as that of a key's bias, is measured against the largest.
    floor = 1e4 * min(eps, 1e-7) * max(sizes.values(), default=0.0)
    generator = torch.Generator().manual_seed(7)
    errors: dict[str, float] = {}
    covered: set[str] = set()
    for weights in (torch.ones(samples), torch.randn(samples, generator=generator)):
        truth = _weighted_gradients(losses, leaves, weights)
        covered |= truth.keys()
        for name, expected in truth.items():
            if name not in by_name:
                raise AuditError(f"audit: autograd has a gradient for `{name}`, which per_sample missed.", name)
            gap = _size(double(by_name[name].weighted(weights.double())) - double(expected))
            scale = max(_size(expected), sizes[name], floor)
            error = gap / scale if scale else gap
            errors[name] = max(errors.get(name, 0.0), error)
            if not error <= tolerance:  # nor if it is NaN
                raise AuditError(
                    f"audit: the weighted sum for `{name}` is off by {error:.1e}, relative to "
                    "autograd's own gradient. A hook or a custom Function that is not linear in the gradient does "
                    "this: sums say nothing about such a model. So does a Function that mixes rows and was declared by "
                    "declare_samplewise. Otherwise please report the model: this is a bug in gradrein, or in a "
                    "registered rule.",
                    name,
                )
    worst = _norms_error(each, by_name, tolerance, floor) if samples else 0.0
    return Audit(errors, worst, tuple(n for n in leaves if n not in covered))


def _weighted_gradients(losses: Losses, leaves: Mapping[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Return autograd's own gradient of the weighted losses, for each parameter that has one."""
    if not losses.root.requires_grad:
        return {}
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    with losses.unspoilt():
        gradients = engine.gradients_at(losses.root, losses.weights_of_entries(weights), edges)
    dense = [one.to_dense() if one is not None and one.is_sparse else one for one in gradients]
    return {name: gradient for name, gradient in zip(leaves, dense, strict=True) if gradient is not None}


def _refuse_nonfinite(total: Tensor) -> None:
    bad = (~total.isfinite()).nonzero().squeeze(1).tolist()
    if bad:
        raise NonFiniteGradientError(
            f"audit: the gradients of {len(bad)} of {len(total)} samples are NaN or infinite, the first being "
            f"sample {bad[0]}, so sums over samples cannot be compared. `norms()` shows which; audit a finite batch."
        )


def _size(values: Tensor) -> float:
    """Return the norm of a tensor, at every size that float64 has."""
    return float(row_norms(double(values)[None])[0])


def _norms_error(each: Mapping[str, Tensor], by_name: dict[str, SampleGrads], tolerance: float, floor: float) -> float:
    """Compare the norms of one sample with those of its gradient written down."""
    worst = 0.0
    for name, grads in by_name.items():
        direct, short = float(row_norms(grads.dense(slice(0, 1)))[0]), float(each[name][0])
        scale = max(direct, floor)
        gap = abs(direct - short) / scale if scale else short
        if not gap <= 10 * tolerance:
            raise AuditError(f"audit: two ways to the norm of `{name}` differ by {gap:.1e}.", name)
        worst = max(worst, gap)
    return worst
