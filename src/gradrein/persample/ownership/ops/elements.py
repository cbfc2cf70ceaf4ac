"""Ops that take every element by itself, and ops that only move elements by sizes and dims."""

from math import prod

from ..owners import NOBODY, Owners
from .step import Step, base_name, input_shape, mixed_along, moves


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
        return mixed_along(step, step.value("dim"))
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


@moves("ViewAsReal")
def view_as_real(step: Step) -> Owners:
    """The last dimension holds the two parts of a complex number."""
    return step.out.mixed([-1]).part(len(step.shape), 0, 1).reshaped(step.shape)


@moves("ViewAsComplex")
def view_as_complex(step: Step) -> Owners:
    """The last dimension becomes the two parts of a complex number."""
    return step.out.without([len(step.shape) - 1], step.shape)
