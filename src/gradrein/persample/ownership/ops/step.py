"""One input of one op, and the table of entries that says who may own its elements."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.autograd.graph import GradientEdge, Node

from .... import graph
from ...._torch import fsdp
from ...._torch.dtensor import is_crossing
from ...._torch.nodes import edge_shape
from ...._torch.signature import kind_of
from ... import engine
from ..crossings import across
from ..owners import SEVERAL, Owners
from .running import by_running
from .slices import SLICES, by_slices


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
            entry = by_slices if name in SLICES else by_running
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
        *("AsStrided", "Gather", "Index", "IndexAdd", "IndexCopy", "IndexPut", "IndexPutImpl", "IndexSelect"),
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


def mixed_along(step: Step, *dims: int) -> Owners:
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


moves("Diagonal", "DiagonalScatter", "Unfold", "PixelShuffle", "PixelUnshuffle", "Trace", "DiagEmbed")(by_running)
