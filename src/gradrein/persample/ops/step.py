"""One input of one op, and who owns its elements."""

from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import fsdp
from ..._torch.nodes import edge_shape
from .. import engine
from ..layout.owners import MIXED, Owners
from .table import OP_TABLE, base_name


@dataclass(frozen=True, eq=False)
class Step:
    """One input of one op.

    Attributes:
        node: the op.
        outs: owners of its outputs.
        position: which input, as an index into ``node.next_functions``; `IDS` for the ids of a look-up.
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
        entry = OP_TABLE.get(base_name(self.node))
        if entry is None:
            return self._custom_sends() if graph.is_custom(self.node) else self.mixed()
        if not entry.all_outputs and not all(o.is_empty for o in self.outs[1:]):
            return self.mixed()
        follows = self.by_indices and entry.by_index is not None and not engine.is_packed(self.node)
        owners = entry.by_index(self) if follows and entry.by_index is not None else entry.owners(self)
        if owners.ids.dim() != len(self.shape):
            return self.mixed()
        for n, size in zip(owners.ids.shape, self.shape, strict=True):
            if n not in (1, size):
                return self.mixed()  # an op in a form that its entry does not know
        return owners

    def _custom_sends(self) -> Owners:
        """Return the owners of an input of a Python Function: only those of torch's distributed training are known."""
        if fsdp.is_passthrough(self.node) and self.position < len(self.outs):
            return self.outs[self.position]
        return Owners.all(MIXED, self.shape)

    def mixed(self) -> Owners:
        """Return the owners where every output may send its gradient to every element of the input."""
        owners = self.out.everywhere(self.shape)
        for other in self.outs[1:]:
            owners = owners.merged(other.everywhere(self.shape))
        return owners

    def mixed_along(self, *dims: int) -> Owners:
        """Mix along dimensions whose size may differ between input and output; all others must agree."""
        count = len(self.shape)
        if len(self.out.shape) != count or not count:
            return self.mixed()
        owners = self.out.mixed(dims)
        if any(owners.ids.shape[d] not in (1, self.shape[d]) for d in range(count)):
            return self.mixed()
        return Owners(owners.ids, self.shape)

    def input_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of any input of the op that needs a gradient."""
        below, output_nr = self.node.next_functions[position]
        assert below is not None
        return edge_shape(GradientEdge(below, output_nr))


def _signed(value: Any) -> Any:
    """Undo torch's habit of handing out negative numbers as unsigned ones."""
    if isinstance(value, tuple | list):
        return tuple(_signed(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 63:
        return value - (1 << 64)
    return value
