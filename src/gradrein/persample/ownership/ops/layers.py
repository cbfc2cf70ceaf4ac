"""Ops with weights: products, convolutions, normalisation, attention, recurrent layers."""

from ..owners import Owners
from .step import Step, base_name, input_shape, moves


@moves("Mm", "Addmm", "Bmm", "Baddbmm")
def matmul(step: Step) -> Owners:
    """Rows of the product come from rows of the left factor, columns from columns of the right one."""
    factor = step.position - (base_name(step.node) in ("Addmm", "Baddbmm"))
    if factor < 0:
        return step.out.summed_to(step.shape)
    return Owners(step.out.mixed([-1 if factor == 0 else -2]).ids, step.shape)


@moves("Mv")
def matrix_vector(step: Step) -> Owners:
    """Each entry of the product comes from one row, and from all of the vector."""
    return step.out.without([1], step.shape) if step.position == 0 else step.mixed()


@moves("Cdist", "EuclideanDist")
def distances(step: Step) -> Owners:
    """Rows of the result come from rows of the first factor, columns from rows of the second one."""
    if step.position == 0:
        return Owners(step.out.mixed([-1]).ids, step.shape)
    return Owners(step.out.mixed([-2]).ids.transpose(-1, -2), step.shape)


@moves("GroupedMm", "Trilinear")
def rows_with_weights(step: Step) -> Owners:
    """Each row meets some weights; these get a gradient from all rows."""
    alike = step.shape[:-1] == step.out.shape[:-1]
    return Owners(step.out.mixed([-1]).ids, step.shape) if alike and step.position != 1 else step.mixed()


@moves("Convolution", "ConvolutionOverrideable", "MkldnnConvolution", "NativeGroupNorm")
def by_groups(step: Step) -> Owners:
    """Channels of one group and their pixels mix, but for pixels under a kernel of one; weights get everything."""
    groups = step.value("groups") or step.value("group")
    if step.position or not groups or len(step.shape) != len(step.out.shape) or len(step.shape) < 2:
        return step.mixed()
    images, channels, *pixels = step.out.shape
    dims = [2, *(dim + 1 for dim in range(2, len(step.shape)) if not _is_pointwise(step, dim))]
    apart = step.out.reshaped((images, groups, channels // groups, *pixels)).mixed(dims)
    given = (images, groups, step.shape[1] // groups, *step.shape[2:])
    return Owners(apart.ids, given).reshaped(step.shape)


def _is_pointwise(step: Step, dim: int) -> bool:
    """Return whether a convolution has a kernel of one along a dimension, and moves nothing there."""
    edges = step.node.next_functions
    if "Convolution" not in base_name(step.node) or len(edges) < 2 or edges[1][0] is None:
        return False  # the size of a kernel that needs no gradient is not recorded
    kernel, stride, padding = input_shape(step.node, 1), step.value("stride"), step.value("padding")
    if len(kernel) != len(step.shape) or not stride or not padding:
        return False
    at = dim - 2  # one number may stand for all dimensions
    still = kernel[dim] == 1 and stride[at % len(stride)] == 1 and padding[at % len(padding)] == 0
    return bool(still and step.shape[dim] == step.out.shape[dim])


@moves("NativeLayerNorm", "FusedRmsNorm")
def layer_norm(step: Step) -> Owners:
    """Elements mix along the dimensions that are normalised."""
    if step.position:
        return step.out.summed_to(step.shape)
    return step.out.mixed(range(-len(step.value("normalized_shape")), 0))


@moves("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
def batch_norm(step: Step) -> Owners:
    """In training everything mixes that has one index in the second dimension; with stored statistics nothing does."""
    by_channel = step.out.mixed(d for d in range(len(step.out.shape)) if d != 1)
    if step.position:
        return Owners(by_channel.ids.reshape(-1), step.shape)
    return step.out if step.value("training") is False else by_channel


@moves(
    *("ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductFusedAttentionOverrideable"),
)
def attention(step: Step) -> Owners:
    """Everything mixes that has one index in the first two dimensions; with grouped queries, in the first."""
    same_heads = step.shape[1:2] == step.out.shape[1:2]
    found = step.out.mixed(range(2 if same_heads else 1, len(step.out.shape)))
    return Owners(found.ids, step.out.shape).summed_to(step.shape) if _is_bias(step) else Owners(found.ids, step.shape)


def _is_bias(step: Step) -> bool:
    return step.position > 2


@moves("MkldnnRnnLayer")
def recurrent(step: Step) -> Owners:
    """(time, batch, features), and two states (batch, features): columns of the batch stay apart."""
    if step.position not in (0, 5, 6):
        return step.mixed()
    steps, *states = step.outs
    found = steps.mixed([0, 2])
    column = Owners(found.ids.reshape(-1, 1), states[0].shape)
    for state in states:
        column = column.merged(state.mixed([1]))
    return Owners(column.ids.reshape((1,) * (len(step.shape) - 2) + (-1, 1)), step.shape)
