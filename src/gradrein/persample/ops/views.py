"""Ops that only move elements by sizes and dims: views, slices, concatenations, padding."""

from math import prod

from ..layout import UNREACHED, Owners
from ..representations.base import Dense, SampleGrads
from .indexing import by_running
from .rules import RuleContext
from .table import OpEntry, Step, add_op, base_name, input_shape


def reshape(step: Step) -> Owners:
    """The same elements in the same order."""
    return step.out.reshaped(step.shape) if prod(step.shape) == prod(step.out.shape) else step.mixed()


def flip(step: Step) -> Owners:
    """Some dimensions backwards."""
    return Owners(step.out.ids.flip([dim % len(step.shape) for dim in step.value("dims")]), step.shape)


def roll(step: Step) -> Owners:
    """Some dimensions shifted around; without dimensions, all elements as one row."""
    ids, dims = step.out.ids.expand(step.shape), [dim % len(step.shape) for dim in step.value("dims")]
    back = [-n for n in step.value("shifts")]
    return Owners.of(ids.roll(back, dims) if dims else ids.roll(back), step.shape)


def permute(step: Step) -> Owners:
    """Dimensions in another order."""
    return step.out.permuted(step.value("dims"))


def transpose(step: Step) -> Owners:
    """Two dimensions exchanged."""
    dims = list(range(len(step.shape)))
    if len(dims) > 1:
        a, b = (0, 1) if base_name(step.node) == "T" else (step.value("dim0"), step.value("dim1"))
        dims[a], dims[b] = dims[b], dims[a]
    return step.out.permuted(dims) if dims else step.out


def slice_(step: Step) -> Owners:
    """Every `step`-th element between two bounds along a dimension."""
    dim = step.value("dim") % len(step.shape)
    where = slice(*slice(step.value("start"), step.value("end"), step.value("step")).indices(step.shape[dim]))
    return step.out.placed(dim, where, step.shape)


def select(step: Step) -> Owners:
    """One index of a dimension, which is gone afterwards."""
    dim = step.value("dim") % len(step.shape)
    index = step.value("index") % step.shape[dim]
    one = (*step.shape[:dim], 1, *step.shape[dim + 1 :])
    return step.out.without([dim], one).placed(dim, slice(index, index + 1), step.shape)


def cat(step: Step) -> Owners:
    """One tensor after the other along a dimension."""
    if step.shape == (0,) or any(below is None for below, _ in step.node.next_functions):
        # The sizes of inputs that need no gradient are not recorded.
        return step.mixed_along(step.value("dim"))
    dim = step.value("dim") % len(step.shape)
    before = [input_shape(step.node, i) for i in range(step.position)]
    start = sum(shape[dim] for shape in before if shape != (0,))
    return step.out.part(dim, start, step.shape[dim])


def stack(step: Step) -> Owners:
    """One tensor beside the other along a new dimension."""
    dim = step.value("dim") % len(step.out.shape)
    if any(below is None for below, _ in step.node.next_functions):
        return step.out.mixed([dim]).part(dim, 0, 1).reshaped(step.shape)
    return step.out.part(dim, step.position, 1).reshaped(step.shape)


def split(step: Step) -> Owners:
    """Several outputs, one after the other along a dimension of the input."""
    dim = step.value("dim") % len(step.shape)
    unbound, ids = base_name(step.node) == "Unbind", step.out.ids
    if not unbound and ids.shape[dim] == 1 and all(ids.equal(out.ids) for out in step.outs[1:]):
        return Owners(ids, step.shape)  # the usual case: rows are cut, and stay those of one sample each
    owners = Owners.all(UNREACHED, step.shape)
    start = 0
    for out in step.outs:
        size = 1 if unbound else out.shape[dim]
        one = out.without([dim], (*step.shape[:dim], 1, *step.shape[dim + 1 :])) if unbound else out
        owners = owners.merged(one.placed(dim, slice(start, start + size), step.shape))
        start += size
    return owners


def repeat(step: Step) -> Owners:
    """A tensor laid out several times along each dimension."""
    extra = len(step.out.shape) - len(step.shape)
    shape = (1,) * extra + step.shape
    cut = [n for out, size in zip(step.out.shape, shape, strict=True) for n in (out // max(size, 1), size)]
    owners = step.out.reshaped(cut).mixed(range(0, len(cut), 2))
    return Owners(owners.ids.reshape(owners.ids.shape[1::2]), shape).reshaped(step.shape)


def pad(step: Step) -> Owners:
    """Constants around a tensor."""
    owners, pads = step.out, step.value("pad")
    for i in range(len(pads) // 2):
        dim = len(step.shape) - 1 - i
        if owners.ids.shape[dim] > 1 and (pads[2 * i] < 0 or pads[2 * i + 1] < 0):
            return step.mixed()
        owners = owners.part(dim, max(pads[2 * i], 0), step.shape[dim])
    return owners


def view_as_real(step: Step) -> Owners:
    """The last dimension holds the two parts of a complex number."""
    return step.out.mixed([-1]).part(len(step.shape), 0, 1).reshaped(step.shape)


def view_as_complex(step: Step) -> Owners:
    """The last dimension becomes the two parts of a complex number."""
    return step.out.without([len(step.shape) - 1], step.shape)


def repeat_rule(ctx: RuleContext) -> SampleGrads:
    """Undo a repetition: each dimension of the output is (times, size), and only the size stays."""
    sizes = ctx.gradient.shape
    shape = (1,) * (len(sizes) - len(ctx.shape)) + ctx.shape
    cut = [n for out, size in zip(sizes, shape, strict=True) for n in (out // max(size, 1), size)]
    kept = [n for size in shape for n in (1, size)]
    return Dense(ctx.layout.sums(ctx.gradient.reshape(cut), kept).reshape(ctx.samples, *ctx.shape))


add_op("View", "UnsafeView", "ReshapeAlias", "ReshapeCopy", "Unsqueeze", "Squeeze", entry=OpEntry(reshape))
add_op("Flip", entry=OpEntry(flip))
add_op("Roll", entry=OpEntry(roll))
add_op("Permute", entry=OpEntry(permute))
add_op("Transpose", "T", entry=OpEntry(transpose))
add_op("Slice", entry=OpEntry(slice_))
add_op("Select", entry=OpEntry(select))
add_op("Cat", entry=OpEntry(cat))
add_op("Stack", entry=OpEntry(stack))
add_op(
    "Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "Unbind", entry=OpEntry(split, all_outputs=True)
)
add_op("Repeat", entry=OpEntry(repeat, rule=repeat_rule))
add_op("ConstantPadNd", entry=OpEntry(pad))
add_op("ViewAsReal", entry=OpEntry(view_as_real))
add_op("ViewAsComplex", entry=OpEntry(view_as_complex))
add_op(
    "Diagonal",
    "DiagonalScatter",
    "Unfold",
    "PixelShuffle",
    "PixelUnshuffle",
    "Trace",
    "DiagEmbed",
    entry=OpEntry(by_running),
)
