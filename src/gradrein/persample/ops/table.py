"""The table of ops: one entry for each, under every name that torch has for it on any device; what rules are given."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import fsdp
from ..._torch.nodes import edge_shape
from ..._torch.signature import kind_of
from .. import engine
from ..layout.owners import MIXED, Owners
from ..layout.samples import NotSeparableError, SampleLayout
from ..representations.base import SampleGrads


@dataclass(eq=False)
class RuleContext:
    """One use of a parameter, or of a value made from parameters alone, by one op of the recorded graph.

    Attributes:
        op: what torch calls the op, such as ``AddmmBackward0``.
        node: the op, as torch recorded it.
        position: which of its inputs the value is, as an index into ``node.next_functions``.
        shape: shape of the value.
        gradients: gradient of the sum of all losses at each output of the op; None where there is none.
        layouts: for each output, which sample owns which element.
        samples: how many samples there are.
        allow_coupling: whether the user accepts losses that depend on other samples.
        gradient: the first of the gradients.
        layout: the first of the layouts.
    """

    op: str
    node: Node
    position: int
    shape: tuple[int, ...]
    gradients: tuple[Tensor | None, ...]
    layouts: tuple[SampleLayout, ...]
    samples: int
    allow_coupling: bool = False
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)  # shared by the uses of one op
    gradient: Tensor = field(init=False)
    layout: SampleLayout = field(init=False)

    def __post_init__(self) -> None:
        self.gradient, self.layout = self.gradients[0], self.layouts[0]  # type: ignore[assignment]  # not asked if None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self._value.dtype

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros as the value is: of its dtype, on its device."""
        return torch.zeros(shape, dtype=self.dtype, device=self._value.device)

    @property
    def _value(self) -> Tensor | graph.OutputInfo:
        below, output_nr = self.node.next_functions[self.position]
        assert below is not None
        return graph.leaf_tensor(below) if graph.is_leaf(below) else graph.describe(below)[output_nr]

    def saved(self, name: str) -> Any:
        """Return what the op saved under torch's name for it, such as ``mat1`` or ``input``."""
        if name not in self._cache:
            try:
                value = getattr(self.node, f"_saved_{name}")
            except RuntimeError as error:
                engine.raise_explained(f"what `{self.op}` saved as `{name}`", error)
            if isinstance(value, Tensor):
                if value.layout is not torch.strided or value.is_nested:
                    raise NotSeparableError  # rules count on rows; torch's own backward knows what to do
                value = value.detach()
            self._cache[name] = value
        return self._cache[name]

    def run(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Run the op's backward with other gradients at its outputs; return what the value gets."""
        with torch.no_grad():
            answer = engine.call(self.node, gradients)[self.position]
        if answer is None:
            return self.zeros(*self.shape)
        if answer.is_sparse:
            answer = answer.to_dense()
        return answer.sum_to_size(self.shape)

    def scaled(self, weights: Tensor) -> list[Tensor | None]:
        """Return the gradients at the outputs with each sample's part multiplied by its weight."""
        out: list[Tensor | None] = []
        for gradient, layout in zip(self.gradients, self.layouts, strict=True):
            if gradient is None:
                out.append(None)
                continue
            w = weights.to(gradient)
            if layout.block is not None:
                cut = gradient.reshape(-1, layout.samples, layout.block) * w[:, None]
                out.append(cut.view(gradient.shape))
            else:
                owner = layout.owner_of_each(gradient.numel(), gradient.device).view(gradient.shape)
                out.append(gradient * torch.where(owner >= 0, w[owner.clamp(min=0)], 0))
        return out


OwnerRule: TypeAlias = Callable[["Step"], Owners]
GradientRule: TypeAlias = Callable[[RuleContext], SampleGrads | Tensor]


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
        return _signed(getattr(self.node, f"_saved_{name}", None))

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
