"""The table of ops: one entry for each, under every name that torch has for it on any device."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import fsdp
from ..._torch.nodes import edge_shape
from ..._torch.saved import kind_of
from .. import engine
from ..layout import MIXED, Owners
from ..representations.base import SampleGrads
from .samplewise import by_rows, samplewise

if TYPE_CHECKING:
    from .rules import RuleContext


OwnerRule: TypeAlias = Callable[["Step"], Owners]
GradientRule: TypeAlias = Callable[["RuleContext"], SampleGrads | Tensor]


@dataclass(frozen=True)
class OpEntry:
    """What per-sample gradients have to know of an op.

    Attributes:
        owners: who may own the elements of one of its inputs, given who owns its outputs. Every multiplier counts as
            non-zero: a mask, a gate or a coefficient may be zero today and not tomorrow. It may claim more mixing than
            there is, never less than some values would cause.
        keeps: which inputs the op keeps that may be data, by position, with torch's name for each.
        ids: torch's name for the ids, of an op that looks up rows or cells of its input. These are no input that could
            have a gradient: `owners` is asked about them under the position `IDS`.
        by_index: the same as `owners`, of an op that only moves elements to where a saved index or mask says. It
            follows these, so that what is found holds for one graph alone.
        all_outputs: whether `owners` and `rule` look at more than the first output.
        rule: the per-sample gradients of one use of a parameter by the op; without one its backward is run once for
            each sample.
        runs_op: whether the rule may run the op. Inside the engine an op leaves out what it was not asked for, so such
            a rule waits until the engine is done; one that reads saved tensors only runs at once.
    """

    owners: OwnerRule
    keeps: Mapping[int, str] = field(default_factory=dict)
    ids: str = ""
    by_index: OwnerRule | None = None
    all_outputs: bool = False
    rule: GradientRule | None = None
    runs_op: bool = False


OP_TABLE: dict[str, OpEntry] = {}
# The position under which the owners of ids are asked for.
IDS = -1


def add_op(*names: str, entry: OpEntry) -> None:
    """Add the entry of an op, by torch's names for it without ``Backward`` and its number."""
    for name in names:
        assert name not in OP_TABLE, f"{name} has an entry already"
        OP_TABLE[name] = entry


def entry_of(node: Node) -> OpEntry | None:
    """Return the entry of an op; None if it has none, and so sends every output to every input."""
    return OP_TABLE.get(base_name(node))


def moves_by_index(node: Node) -> bool:
    """Return whether an op moves elements by a saved index or mask, or by their places in memory."""
    entry = entry_of(node)
    return entry is not None and entry.by_index is not None


def input_shape(node: Node, position: int = 0) -> tuple[int, ...]:
    """Return the shape of an input of an op that needs a gradient."""
    below, output_nr = node.next_functions[position]
    assert below is not None
    return edge_shape(GradientEdge(below, output_nr))


def base_name(node: Node) -> str:
    """Return torch's name for the op, without ``Backward`` and its number; that of a Python Function with both."""
    name = _NAMES.get(type(node))
    if name is not None:
        return name
    name, kind = graph.op(node), kind_of(node)
    if kind.is_custom:
        return name
    if not kind.is_generic:
        _NAMES[type(node)] = without_suffix(name)
    return without_suffix(name)


@lru_cache(maxsize=1024)
def without_suffix(name: str) -> str:
    """Return the name of a node without ``Backward`` and its number."""
    return _SUFFIX.sub("", name)


_SUFFIX = re.compile(r"Backwards?\d*(_copy)?$")
# By the type of the node, where torch has one for the op.
_NAMES: dict[type, str] = {}


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
        return engine.signed(getattr(self.node, f"_saved_{name}", None))

    def sends(self) -> Owners:
        """Return the owners of the input."""
        entry = entry_of(self.node)
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
        """Return the owners of an input of a Python Function, where it is known or declared what it does with rows."""
        if fsdp.is_passthrough(self.node) and self.position < len(self.outs):
            return self.outs[self.position]
        known = samplewise(self.node)
        return Owners.all(MIXED, self.shape) if known is None else by_rows(self, known)

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

    def by_first(self) -> Owners:
        """Mix everything that has one index in the first dimension."""
        if not self.shape or self.shape[:1] != self.out.shape[:1]:
            return self.mixed()
        return Owners(self.out.line(0).ids.view(-1, *(1,) * (len(self.shape) - 1)), self.shape)
