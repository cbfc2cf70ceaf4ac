"""What a rank of a tensor-parallel mesh needs in order to compute its shard of per-sample gradients.

The gradient of a parameter at an op is a sum of products of the gradient at the op's output and of what the op saved.
Along each dimension of the mesh a parameter is cut in one of its own dimensions, or not at all. The table says which
shards of the two then give its shard, by the algebra of the op alone. How they lie when they are found does not matter:
torch redistributes them, which sends nothing where they lie as needed, as they do in column- and row-wise layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor


@dataclass(frozen=True)
class Need:
    """What is needed along one dimension of the mesh; a number is the dimension that is cut, None is the whole.

    Attributes:
        gradient: of the gradient at the output.
        saved: of what the op saved, by name; the whole of what is not listed.
        is_partial: whether the results of the ranks have to be added up.
    """

    gradient: int | None = None
    saved: Mapping[str, int | None] = field(default_factory=dict)
    is_partial: bool = False


@dataclass(frozen=True)
class Use:
    """A use of a value by an op, all of it whole.

    Attributes:
        position: which input of the op the value is.
        shape: the shape of the value.
        gradient: the gradient at the output.
        saved: reads what the op saved.
    """

    position: int
    shape: tuple[int, ...]
    gradient: Tensor
    saved: Callable[[str], Tensor]


# Given a use, the dimension in which the value is cut, and the one in which the gradient is cut already.
_Entry: TypeAlias = Callable[[Use, int | None, int | None], Need | None]


def need_of(op: str, use: Use, dim: int | None, now: int | None) -> Need | None:
    """Return what a use needs along one dimension of the mesh; None if that is not known for the op."""
    entry = _ENTRIES.get(op)
    return None if entry is None else entry(use, dim, now)


def _product(side: int, first: str, second: str) -> _Entry:
    """The value is one side of ``first @ second``, shapes (m, k) and (k, n); the gradient is (m, n)."""

    def need(_: Use, dim: int | None, __: int | None) -> Need:
        if dim is None:
            return Need()
        if side == 1:
            return Need(None, {first: 1}) if dim == 0 else Need(1)
        return Need(0) if dim == 0 else Need(None, {second: 0})

    return need


def _summed(*names: str) -> _Entry:
    """Products, element by element, are summed to the shape of the value, which was broadcast to the output's."""

    def need(use: Use, dim: int | None, now: int | None) -> Need | None:
        sizes = use.gradient.shape
        extra = len(sizes) - len(use.shape)
        if dim is not None:
            cut = dim + extra
            return Need(cut, _along(use, names, cut)) if use.shape[dim] == sizes[cut] else None
        if now is not None and (now < extra or use.shape[now - extra] == 1 < sizes[now]):
            return Need(now, _along(use, names, now), is_partial=True)
        return Need()

    return need


def _along(use: Use, names: tuple[str, ...], cut: int) -> dict[str, int | None]:
    """Return where saved tensors, which broadcast to the output, are cut if that is."""
    found: dict[str, int | None] = {}
    for name in names:
        tensor = use.saved(name)
        dim = cut - (use.gradient.dim() - tensor.dim())
        found[name] = dim if dim >= 0 and tensor.shape[dim] == use.gradient.shape[cut] else None
    return found


def _by_position(*entries: _Entry | None) -> _Entry:
    def need(use: Use, dim: int | None, now: int | None) -> Need | None:
        entry = entries[use.position]
        return None if entry is None else entry(use, dim, now)

    return need


def _looked_up(use: Use, dim: int | None, _: int | None) -> Need | None:
    """A table that is cut between its rows needs the whole gradient, of which other ranks use other rows."""
    if dim == 0 and use.saved("scale_grad_by_freq"):
        return None  # how often an id is looked up is counted on the rank that has its row
    return Need(use.gradient.dim() - 1) if dim == 1 else Need()


_ENTRIES: dict[str, _Entry] = {
    "MmBackward0": _by_position(_product(0, "self", "mat2"), _product(1, "self", "mat2")),
    "AddmmBackward0": _by_position(_summed(), _product(0, "mat1", "mat2"), _product(1, "mat1", "mat2")),
    "AddBackward0": _summed(),
    "SubBackward0": _summed(),
    "ExpandBackward0": _summed(),
    "MulBackward0": _by_position(_summed("other"), _summed("self")),
    "NativeLayerNormBackward0": _by_position(None, _summed("input", "result1", "result2"), _summed()),
    "EmbeddingBackward0": _looked_up,
}
