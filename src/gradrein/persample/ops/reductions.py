"""Ops that mix elements along dimensions: reductions, scans, indices, losses, pooling."""

import re

from ..layout import Owners
from .table import OpEntry, Step, add_op, base_name


def reduce(step: Step) -> Owners:
    """A reduction sends the gradient of one output to every element that it was made from."""
    dims = step.value("dim")
    if not step.out.shape or not step.shape:
        return step.mixed()
    dims = (dims,) if isinstance(dims, int) else dims or tuple(range(len(step.shape)))
    if step.value("keepdim"):
        return Owners(step.out.ids, step.shape)
    return step.out.without(dims, step.shape)


def along_dims(step: Step) -> Owners:
    """Elements mix along the dimensions the op names, and nowhere else."""
    dims = step.value("dim")
    dims = step.value("dims") if dims is None else dims
    if dims is None or (isinstance(dims, tuple) and not dims):
        return step.mixed()
    return step.mixed_along(*((dims,) if isinstance(dims, int) else dims))


def nll_loss(step: Step) -> Owners:
    """One loss for each row of scores, classes in the second dimension; or one number."""
    if not step.out.shape:
        return step.mixed()
    return step.out.without([1], step.shape)


def ctc_loss(step: Step) -> Owners:
    """One loss for each column of (time, batch, classes)."""
    return Owners(step.out.ids.reshape(1, -1, 1), step.shape) if len(step.shape) == 3 else step.mixed()


_SPATIAL = re.compile(r"([123])D")


def spatial(step: Step) -> Owners:
    """Elements mix along the last one, two or three dimensions, whose sizes may change."""
    dims = _SPATIAL.search(base_name(step.node))
    assert dims is not None
    return step.mixed_along(*range(-int(dims[1]), 0))


add_op(
    *("Sum", "Mean", "Var", "Std", "LinalgVectorNorm", "Norm", "Amax", "Amin", "Max", "Min", "Median", "Nanmedian"),
    *("Prod", "Logsumexp", "Mode", "Kthvalue", "Nansum", "Aminmax"),
    entry=OpEntry(reduce),
)
add_op(
    *("Softmax", "LogSoftmax", "SafeSoftmax", "Cumsum", "Cumprod", "Cummax", "Cummin", "Logcumsumexp", "FftR2C"),
    *("FftC2R", "FftC2C", "Glu", "ScatterReduce", "IndexFill", "TakeAlongDim"),
    entry=OpEntry(along_dims),
)
add_op("NllLoss", "NllLoss2D", entry=OpEntry(nll_loss))
add_op("CtcLoss", entry=OpEntry(ctc_loss))
add_op(
    *("AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
    *("MaxPool2DWithIndices", "MaxPool3DWithIndices", "FractionalMaxPool2D", "FractionalMaxPool3D"),
    *("MkldnnAdaptiveAvgPool2D", "ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D", "ReplicationPad1D"),
    *("ReplicationPad2D", "ReplicationPad3D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D"),
    *("UpsampleNearestExact1D", "UpsampleNearestExact2D", "UpsampleNearestExact3D", "UpsampleLinear1D"),
    *("UpsampleBilinear2D", "UpsampleBilinear2DAa", "UpsampleBicubic2D", "UpsampleBicubic2DAa"),
    *("UpsampleTrilinear3D", "AvgPool1D"),
    entry=OpEntry(spatial),
)
add_op("Im2Col", "Col2Im", entry=OpEntry(Step.by_first))
add_op("GridSampler2D", "GridSampler3D", entry=OpEntry(Step.by_first, keeps={0: "input", 1: "grid"}))
add_op("CudnnGridSampler", entry=OpEntry(Step.by_first, keeps={0: "self", 1: "grid"}))
add_op("LinalgCross", entry=OpEntry(along_dims, keeps={0: "self", 1: "other"}))
