"""Where each op sends its gradients, whatever the values are: one entry per op.

Each entry answers, for one input of an op, who may own its elements, given who owns the outputs. Every multiplier
counts as non-zero: a mask, a gate or a coefficient may be zero today and not tomorrow. An entry may claim more mixing
than there is, never less than some values would cause. An op without an entry sends every output to every input.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import fsdp
from ..._torch.dtensor import is_crossing
from ..._torch.nodes import edge_shape
from ..._torch.signature import kind_of
from .. import engine
from .crossings import across
from .owners import NOBODY, SEVERAL, Owners


@dataclass(frozen=True, eq=False)
class Step:
    """One input of one op.

    Attributes:
        node: the op.
        outs: owners of its outputs.
        position: which input, as an index into ``node.next_functions``.
        shape: the shape of the input.
        by_indices: whether to follow the indices that the op saved; what is found then holds for this graph alone.
    """

    node: Node
    outs: tuple[Owners, ...]
    position: int
    shape: tuple[int, ...]
    by_indices: bool = False

    @property
    def out(self) -> Owners:
        """Owners of the first output."""
        return self.outs[0]

    def value(self, name: str) -> Any:
        """Return a size, dim or flag that the op saved, dims as Python counts them; None if there is none."""
        return _signed(getattr(self.node, f"_saved_{name}", None))

    def sends(self) -> Owners:
        """Return the owners of the input."""
        if type(self.node) not in _BUILT_IN and graph.is_custom(self.node):
            if fsdp.is_passthrough(self.node) and self.position < len(self.outs):
                return self.outs[self.position]
            return across(self.out, self.shape) if is_crossing(self.node) else Owners.all(SEVERAL, self.shape)
        name = base_name(self.node)
        entry = MOVES.get(name)
        if self.by_indices and name in _BY_INDEX and not engine.is_packed(self.node):
            entry = asked_of_torch
        if entry is None or (name not in _ALL_OUTPUTS and not all(o.is_empty for o in self.outs[1:])):
            return self.mixed()
        found = entry(self)
        if found.ids.dim() != len(self.shape):
            return self.mixed()
        for n, size in zip(found.ids.shape, self.shape, strict=True):
            if n not in (1, size):
                return self.mixed()  # an op in a form that its entry does not know
        return found

    def mixed(self) -> Owners:
        """Return the owners where every output may send its gradient to every element of the input."""
        found = self.out.everywhere(self.shape)
        for other in self.outs[1:]:
            found = found.merged(other.everywhere(self.shape))
        return found


Moves: TypeAlias = Callable[[Step], Owners]
MOVES: dict[str, Moves] = {}
# Ops whose entry looks at more than the first output.
_ALL_OUTPUTS = frozenset({"Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "Unbind", "MkldnnRnnLayer"})


# Ops that move elements to where a saved index or mask says, and do nothing else to their gradients. A stride counts
# places in memory, and which element lies there is not recorded where the signature of a graph could see it.
_BY_INDEX = frozenset(
    {
        *(
            "AsStrided",
            "Gather",
            "Index",
            "IndexAdd",
            "IndexCopy",
            "IndexPut",
            "IndexPutImpl",
            "IndexSelect",
            "MaskedScatter",
        ),
        *("MaskedScatter", "MaskedSelect", "Scatter", "ScatterAdd", "Sort", "Take", "Topk"),
    }
)


def moves_by_index(node: Node) -> bool:
    """Return whether an op moves elements by a saved index or mask, or by their places in memory."""
    return base_name(node) in _BY_INDEX


def moves(*names: str) -> Callable[[Moves], Moves]:
    """Register an entry for ops by torch's name without ``Backward`` and its number."""

    def register(entry: Moves) -> Moves:
        MOVES.update(dict.fromkeys(names, entry))
        return entry

    return register


def base_name(node: Node) -> str:
    """Return torch's name for the op, without ``Backward`` and its number; that of a Python Function with both."""
    known = _BUILT_IN.get(type(node))
    if known is not None:
        return known
    name, kind = graph.op(node), kind_of(node)
    if kind.is_custom:
        return name
    if not kind.is_generic:
        _BUILT_IN[type(node)] = _SUFFIX.sub("", name)
    return _SUFFIX.sub("", name)


_SUFFIX = re.compile(r"Backwards?\d*(_copy)?$")
# By the type of the node, where torch has one for the op.
_BUILT_IN: dict[type, str] = {}


def _signed(value: Any) -> Any:
    """Undo torch's habit of handing out negative numbers as unsigned ones."""
    if isinstance(value, tuple | list):
        return tuple(_signed(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 63:
        return value - (1 << 64)
    return value


@moves(
    *("Abs", "Acos", "Acosh", "Add", "Addcdiv", "Addcmul", "Alias", "Angle", "Asin", "Asinh", "Atan", "Atan2", "Atanh"),
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Ceil", "Celu", "Clamp", "ClampMax", "ClampMin", "Clone"),
    *("Complex", "Conj", "ConjPhysical", "Copy", "Copysign", "Cos", "Cosh", "Deg2Rad", "Digamma", "Div", "Elu", "Erf"),
    *("Erfc", "Erfinv", "Exp", "Exp2", "Expand", "Expm1", "Fill", "Floor", "Fmax", "Fmin", "Fmod", "Frac", "Gelu"),
    *("Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "Hypot", "I0", "Imag", "L1Loss", "LeakyRelu"),
    *("Lerp", "Lgamma", "Log", "Log10", "Log1P", "Log2", "LogSigmoid", "Logaddexp", "Logaddexp2", "Logit"),
    *("MaskedFill", "Maximum", "Minimum", "Mish", "MseLoss", "Mul", "NanToNum", "NativeDropout", "Neg", "Polar", "Pow"),
    *("PreluKernel", "Rad2Deg", "Real", "Reciprocal", "Relu", "Remainder", "ResolveConj", "ResolveNeg", "Round"),
    *("RreluWithNoise", "Rsqrt", "Rsub", "Selu", "Sgn", "Sigmoid", "Sign", "Silu", "Sin", "Sinc", "Sinh"),
    *("SmoothL1Loss", "SoftMarginLoss", "Softplus", "Softshrink", "Sqrt", "Sub", "Tan", "Tanh", "Threshold"),
    *("ToCopy", "Tril", "Triu", "Trunc", "Where", "Xlogy", "Zero", "KlDiv", "Square", "NegView", "Contiguous"),
)
def elementwise(step: Step) -> Owners:
    """Every element by itself, inputs broadcast; a loss may reduce to one number."""
    sizes = zip(reversed(step.shape), reversed(step.out.shape), strict=False)
    if len(step.shape) > len(step.out.shape) or any(n not in (1, size) for n, size in sizes):
        return step.mixed()
    return step.out.summed_to(step.shape)


@moves("View", "UnsafeView", "ReshapeAlias", "ReshapeCopy", "Unsqueeze", "Squeeze")
def reshape(step: Step) -> Owners:
    """The same elements in the same order."""
    return step.out.reshaped(step.shape) if prod(step.shape) == prod(step.out.shape) else step.mixed()


@moves("Flip")
def flip(step: Step) -> Owners:
    """Some dimensions backwards."""
    return Owners(step.out.ids.flip([dim % len(step.shape) for dim in step.value("dims")]), step.shape)


@moves("Roll")
def roll(step: Step) -> Owners:
    """Some dimensions shifted around; without dimensions, all elements as one row."""
    ids, dims = step.out.ids.expand(step.shape), [dim % len(step.shape) for dim in step.value("dims")]
    back = [-n for n in step.value("shifts")]
    return Owners.of(ids.roll(back, dims) if dims else ids.roll(back), step.shape)


@moves("Permute")
def permute(step: Step) -> Owners:
    """Dimensions in another order."""
    return step.out.permuted(step.value("dims"))


@moves("Transpose", "T")
def transpose(step: Step) -> Owners:
    """Two dimensions exchanged."""
    dims = list(range(len(step.shape)))
    if len(dims) > 1:
        a, b = (0, 1) if base_name(step.node) == "T" else (step.value("dim0"), step.value("dim1"))
        dims[a], dims[b] = dims[b], dims[a]
    return step.out.permuted(dims) if dims else step.out


@moves("Slice")
def slice_(step: Step) -> Owners:
    """Every `step`-th element between two bounds along a dimension."""
    dim = step.value("dim") % len(step.shape)
    where = slice(*slice(step.value("start"), step.value("end"), step.value("step")).indices(step.shape[dim]))
    return step.out.placed(dim, where, step.shape)


@moves("Select")
def select(step: Step) -> Owners:
    """One index of a dimension, which is gone afterwards."""
    dim = step.value("dim") % len(step.shape)
    index = step.value("index") % step.shape[dim]
    one = (*step.shape[:dim], 1, *step.shape[dim + 1 :])
    return step.out.without([dim], one).placed(dim, slice(index, index + 1), step.shape)


@moves("Cat")
def cat(step: Step) -> Owners:
    """One tensor after the other along a dimension."""
    if step.shape == (0,) or any(below is None for below, _ in step.node.next_functions):
        # The sizes of inputs that need no gradient are not recorded.
        return _mixed_along(step, step.value("dim"))
    dim = step.value("dim") % len(step.shape)
    before = [input_shape(step.node, i) for i in range(step.position)]
    start = sum(shape[dim] for shape in before if shape != (0,))
    return step.out.part(dim, start, step.shape[dim])


@moves("Stack")
def stack(step: Step) -> Owners:
    """One tensor beside the other along a new dimension."""
    dim = step.value("dim") % len(step.out.shape)
    if any(below is None for below, _ in step.node.next_functions):
        return step.out.mixed([dim]).part(dim, 0, 1).reshaped(step.shape)
    return step.out.part(dim, step.position, 1).reshaped(step.shape)


@moves("Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "Unbind")
def split(step: Step) -> Owners:
    """Several outputs, one after the other along a dimension of the input."""
    dim = step.value("dim") % len(step.shape)
    unbound = base_name(step.node) == "Unbind"
    found = Owners.all(NOBODY, step.shape)
    start = 0
    for out in step.outs:
        size = 1 if unbound else out.shape[dim]
        one = out.without([dim], (*step.shape[:dim], 1, *step.shape[dim + 1 :])) if unbound else out
        found = found.merged(one.placed(dim, slice(start, start + size), step.shape))
        start += size
    return found


@moves(
    *("Sum", "Mean", "Var", "Std", "LinalgVectorNorm", "Norm", "Amax", "Amin", "Max", "Min", "Median", "Nanmedian"),
    *("Prod", "Logsumexp", "Mode", "Kthvalue", "Nansum", "Aminmax"),
)
def reduce(step: Step) -> Owners:
    """A reduction sends the gradient of one output to every element that it was made from."""
    dims = step.value("dim")
    if not step.out.shape or not step.shape:
        return step.mixed()
    dims = (dims,) if isinstance(dims, int) else dims or tuple(range(len(step.shape)))
    if step.value("keepdim"):
        return Owners(step.out.ids, step.shape)
    return step.out.without(dims, step.shape)


@moves(
    *("Softmax", "LogSoftmax", "SafeSoftmax", "Cumsum", "Cumprod", "Cummax", "Cummin", "Logcumsumexp", "Sort", "Topk"),
    *("Gather", "IndexSelect", "FftR2C", "FftC2R", "FftC2C", "Glu", "Scatter", "ScatterAdd"),
    *("ScatterReduce", "IndexAdd", "IndexCopy", "IndexFill", "TakeAlongDim"),
)
def along_dims(step: Step) -> Owners:
    """Elements mix along the dimensions the op names, and nowhere else."""
    dims = step.value("dim")
    dims = step.value("dims") if dims is None else dims
    if dims is None or (isinstance(dims, tuple) and not dims):
        return step.mixed()
    return _mixed_along(step, *((dims,) if isinstance(dims, int) else dims))


@moves("Repeat")
def repeat(step: Step) -> Owners:
    """A tensor laid out several times along each dimension."""
    extra = len(step.out.shape) - len(step.shape)
    shape = (1,) * extra + step.shape
    cut = [n for out, size in zip(step.out.shape, shape, strict=True) for n in (out // max(size, 1), size)]
    found = step.out.reshaped(cut).mixed(range(0, len(cut), 2))
    return Owners(found.ids.reshape(found.ids.shape[1::2]), shape).reshaped(step.shape)


@moves("ConstantPadNd")
def pad(step: Step) -> Owners:
    """Constants around a tensor."""
    found, pads = step.out, step.value("pad")
    for i in range(len(pads) // 2):
        dim = len(step.shape) - 1 - i
        if found.ids.shape[dim] > 1 and (pads[2 * i] < 0 or pads[2 * i + 1] < 0):
            return step.mixed()
        found = found.part(dim, max(pads[2 * i], 0), step.shape[dim])
    return found


@moves("Diagonal", "DiagonalScatter", "Unfold", "PixelShuffle", "PixelUnshuffle", "Trace", "DiagEmbed")
def asked_of_torch(step: Step) -> Owners:
    """Run the node on ones and on each binary digit of the owners, in its own dtype: it only moves and adds.

    The owners that meet in an element are one and the same exactly when each digit is set in all of them or in none.
    """
    full = step.out.ids.expand(step.out.shape)
    count, several = _moved(step, full != NOBODY), _moved(step, full == SEVERAL)
    if count is None or several is None or not full.numel():
        return step.mixed()
    exact = count.abs() * torch.finfo(graph.describe(step.node)[0].dtype).eps < 1
    one, owner = exact & (several == 0), torch.zeros_like(count, dtype=torch.int32)
    for digit in range(max(int(full.max()), 0).bit_length()):
        set_here = _moved(step, (full >= 0) & (full >> digit & 1 == 1))
        assert set_here is not None
        one &= (set_here == 0) | (set_here == count)
        owner |= (set_here == count).int() << digit
    return Owners.of(torch.where(count == 0, NOBODY, torch.where(one, owner, SEVERAL)).to(torch.int32), step.shape)


def _moved(step: Step, here: Tensor) -> Tensor | None:
    """Return what the node makes of ones at some elements of its output; None if it sends no gradient."""
    kind = graph.describe(step.node)[0]
    found = engine.call(step.node, [here.to(kind.device, kind.dtype)])[step.position]
    if found is None:
        return None
    return (found.to_dense() if found.is_sparse else found).real.to("cpu", torch.float64)


_SPATIAL = re.compile(r"([123])D")


@moves(
    *("AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
    *(
        "MaxPool2DWithIndices",
        "MaxPool3DWithIndices",
        "FractionalMaxPool2D",
        "FractionalMaxPool3D",
        "MkldnnAdaptiveAvgPool2D",
    ),
    *("ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D", "ReplicationPad1D", "ReplicationPad2D"),
    *("ReplicationPad3D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D", "UpsampleNearestExact1D"),
    *("UpsampleNearestExact2D", "UpsampleNearestExact3D", "UpsampleLinear1D", "UpsampleBilinear2D"),
    *("UpsampleBilinear2DAa", "UpsampleBicubic2D", "UpsampleBicubic2DAa", "UpsampleTrilinear3D", "AvgPool1D"),
)
def spatial(step: Step) -> Owners:
    """Elements mix along the last one, two or three dimensions, whose sizes may change."""
    found = _SPATIAL.search(base_name(step.node))
    assert found is not None
    return _mixed_along(step, *range(-int(found[1]), 0))


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


@moves("Im2Col", "Col2Im")
def inside_first(step: Step) -> Owners:
    """Everything with one index in the first dimension mixes."""
    if step.position or len(step.shape) != len(step.out.shape):
        return _im2col(step) if step.position == 0 and len(step.shape) == 4 else step.mixed()
    return _mixed_along(step, *range(1, len(step.shape)))


def _im2col(step: Step) -> Owners:
    """Patches (N, C * k, L) are made from images (N, C, H, W)."""
    found = step.out.mixed([1, 2])
    return Owners(found.ids.reshape(-1, 1, 1, 1), step.shape)


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


@moves("Mm", "Addmm", "Bmm", "Baddbmm")
def matmul(step: Step) -> Owners:
    """Rows of the product come from rows of the left factor, columns from columns of the right one."""
    factor = step.position - (base_name(step.node) in ("Addmm", "Baddbmm"))
    if factor < 0:
        return step.out.summed_to(step.shape)
    return Owners(step.out.mixed([-1 if factor == 0 else -2]).ids, step.shape)


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


@moves("Embedding", "EmbeddingBag", "Index", "IndexPut")
def anywhere(step: Step) -> Owners:
    """Indices decide where a gradient goes."""
    return step.mixed()


@moves("Mv")
def matrix_vector(step: Step) -> Owners:
    """Each entry of the product comes from one row, and from all of the vector."""
    return step.out.without([1], step.shape) if step.position == 0 else step.mixed()


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


@moves("NllLoss", "NllLoss2D")
def nll_loss(step: Step) -> Owners:
    """One loss for each row of scores, classes in the second dimension; or one number."""
    if not step.out.shape:
        return step.mixed()
    return step.out.without([1], step.shape)


@moves("CtcLoss")
def ctc_loss(step: Step) -> Owners:
    """One loss for each column of (time, batch, classes)."""
    return Owners(step.out.ids.reshape(1, -1, 1), step.shape) if len(step.shape) == 3 else step.mixed()


@moves("ViewAsReal")
def view_as_real(step: Step) -> Owners:
    """The last dimension holds the two parts of a complex number."""
    return step.out.mixed([-1]).part(len(step.shape), 0, 1).reshaped(step.shape)


@moves("ViewAsComplex")
def view_as_complex(step: Step) -> Owners:
    """The last dimension becomes the two parts of a complex number."""
    return step.out.without([len(step.shape) - 1], step.shape)


def _mixed_along(step: Step, *dims: int) -> Owners:
    """Mix along dimensions whose size may differ between input and output; all others must agree."""
    count = len(step.shape)
    if len(step.out.shape) != count or not count:
        return step.mixed()
    wanted = {dim % count for dim in dims}
    found = step.out.mixed(wanted)
    if any(found.ids.shape[d] not in (1, step.shape[d]) for d in range(count)):
        return step.mixed()
    return Owners(found.ids, step.shape)


def input_shape(node: Node, position: int) -> tuple[int, ...]:
    """Return the shape of an input that needs a gradient."""
    below, output_nr = node.next_functions[position]
    assert below is not None
    return edge_shape(GradientEdge(below, output_nr))
