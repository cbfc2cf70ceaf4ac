"""Distances between rows of data and rows of a parameter, such as prototypes or a codebook.

Legend: b sample, t row of a sample, r row of the parameter, d width.
"""

from torch import Tensor

from ..._torch import ops
from ..layout.owners import Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import Computed, SampleGrads
from ..representations.numerics import scale_rows, upcast_half
from .context import RuleContext
from .step import Step
from .table import OpEntry, add_op


def distances(step: Step) -> Owners:
    """Rows of the result come from rows of the first factor, columns from rows of the second one."""
    if step.position == 0:
        return Owners(step.out.mixed([-1]).ids, step.shape)
    return Owners(step.out.mixed([-2]).ids.transpose(-1, -2), step.shape)


def cdist(ctx: RuleContext) -> SampleGrads:
    """``torch.cdist(x1, x2, p)`` where one of both is a parameter without batch dimensions of its own."""
    p = 2.0 if ctx.op == "EuclideanDistBackward0" else ctx.saved("p")
    layout, g, lengths = ctx.layout, ctx.gradient, ctx.saved("result")
    data, parameter = ctx.saved("x1"), ctx.saved("x2")
    if ctx.position == 0:
        data, parameter = parameter, data
        layout, g, lengths = _turned(layout, g), g.mT, lengths.mT
    if parameter.numel() != parameter.shape[-2] * parameter.shape[-1]:
        raise NotSeparableError
    parameter = upcast_half(parameter.reshape(parameter.shape[-2:]))
    data = data.expand(*g.shape[:-1], data.shape[-1])
    g, data, lengths = (upcast_half(layout.by_sample(x, len(parameter))) for x in (g, data, lengths))

    def dense(part: slice) -> Tensor:
        return _backward(g[part], data[part], lengths[part], parameter, p).view(-1, *ctx.shape)

    def weighted(weights: Tensor) -> Tensor:
        heavy, rows, far = (x.flatten(0, 1)[None] for x in (scale_rows(g, weights), data, lengths))
        return _backward(heavy, rows, far, parameter, p).view(ctx.shape)

    return Computed(ctx.samples, ctx.shape, dense, weighted, held_tensors=(g, data, lengths, parameter))


def _turned(layout: SampleLayout, g: Tensor) -> SampleLayout:
    """Return the owners of ``g.mT``."""
    owners = layout.owner_of_each(g.numel(), g.device).view(g.shape)
    return SampleLayout(layout.samples, None, owners.mT.reshape(-1))


def _backward(g: Tensor, data: Tensor, lengths: Tensor, parameter: Tensor, p: float) -> Tensor:
    """Return the gradients of the parameter: (b, r, d)."""
    repeated = parameter.to(g).expand(len(g), *parameter.shape).contiguous()
    answer: Tensor = ops.cdist_backward(
        g.mT.contiguous(), repeated, data.to(g).contiguous(), p, lengths.to(g).mT.contiguous()
    )
    return answer


add_op("Cdist", "EuclideanDist", entry=OpEntry(distances, keeps={0: "x1", 1: "x2"}, rule=cdist))
