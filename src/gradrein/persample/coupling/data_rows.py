"""What is data, and which rows of it are used for which sample.

A row that is used for one sample here and for another one there couples them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ... import graph
from ..._torch.dtensor import stored_shard
from ..._torch.saved import kind_of
from ..._torch.signature import Scan
from ...errors import BatchCouplingError
from .. import engine, tracing
from ..layout import MIXED, UNREACHED, Owners
from ..ops.elementwise import is_elementwise
from ..ops.table import IDS, OpEntry, Step, entry_of
from ..owners.use_sites import UseSite

UNKNOWN = -2  # the position of data in an op without an entry


@dataclass(eq=False)
class ModelTensors:
    """What is no data: parameters and buffers. Looked up only when something might be.

    Attributes:
        parameters: those that were passed, by name.
        model: whose other parameters and buffers are no data either, if there is one.
        rows: how many rows a batch has.
    """

    parameters: dict[str, Tensor]
    model: nn.Module | None
    rows: int

    @cached_property
    def _buffers(self) -> list[Tensor]:
        return [] if self.model is None else list(self.model.buffers())

    @cached_property
    def _storages(self) -> frozenset[int | None]:
        others = [] if self.model is None else [*self.model.parameters(), *self._buffers]
        return frozenset(graph.memory_of(stored_shard(tensor)) for tensor in (*self.parameters.values(), *others))

    def is_data(self, tensor: Tensor) -> bool:
        """Return whether a tensor is neither a parameter nor a buffer, nor a part or a copy of one."""
        tensor = tensor if isinstance(tensor, nn.Parameter) else stored_shard(tensor)
        if tensor.numel() == 0 or isinstance(tensor, nn.Parameter) or graph.memory_of(tensor) in self._storages:
            return False
        value = tracing.constant(tensor)
        buffers = self._buffers if value is not None else []
        return not any(one.shape == tensor.shape and torch.equal(one.to(tensor), tensor) for one in buffers)

    def is_input(self, node: Node) -> bool:
        """Return whether a leaf is an input whose gradient was asked for, rather than a parameter."""
        return graph.is_leaf(node) and self.is_data(graph.leaf_tensor(node))

    def may_hold_samples(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor has as many rows as there are samples, or a multiple, or has samples second."""
        return self.rows in shape[:2] or (len(shape) > 0 and self.rows > 0 and shape[0] % self.rows == 0)


@dataclass(frozen=True, eq=False)
class DataUse:
    """A tensor that an op keeps and that may be data: what the form of the graph tells of it.

    Attributes:
        op: the number of the op in the graph.
        position: which of its inputs the tensor is; UNKNOWN of an op without an entry in the table.
        name: torch's name for it.
        leaf: the number of the leaf that stands there; None if nothing there needs a gradient.
        outs: owners of the outputs of the op.
        tells_apart: whether only this data can make the outputs belong to different samples, since all else is shared.
    """

    op: int
    position: int
    name: str
    leaf: int | None
    outs: tuple[Owners, ...]
    tells_apart: bool
    _owners: dict[tuple[int, ...], Owners] = field(default_factory=dict)

    def owners(self, node: Node, shape: tuple[int, ...]) -> Owners:
        """Return whose rows of data the op takes, which depends on the shape of the data and on the form alone."""
        if self.position == IDS:  # and for ids also on what the op saved
            return Step(node, self.outs, IDS, shape).sends()
        if shape not in self._owners:
            self._owners[shape] = Step(node, self.outs, self.position, shape).sends()
        return self._owners[shape]


def data_uses(
    owners: Mapping[int, tuple[Owners, ...]], cuts: Iterable[UseSite], leaves: Collection[int], scan: Scan
) -> list[DataUse]:
    """Return what some ops keep that may be data.

    Args:
        owners: owners of the outputs of the ops.
        cuts: the uses of shared values.
        leaves: the parameters that were asked about, which are no data.
        scan: the graph.
    """
    number = {scan.nodes[i]: i for i in scan.leaves}
    shared: dict[int, set[int]] = {}
    for cut in cuts:
        shared.setdefault(cut.node, set()).add(cut.position)
    uses = []
    for i, outs in owners.items():
        node, here = scan.nodes[i], shared.get(i, set())
        entry = entry_of(node)
        if entry is None:
            uses += [DataUse(i, UNKNOWN, name, None, outs, False) for name in _saved_names(node)]
            continue
        others = [at for at, (below, _) in enumerate(node.next_functions) if below is not None]
        # Ids of an index are often constants, which look like data: only those of a layer are taken for it.
        may_be_constant = bool(entry.ids) and entry.by_index is not None
        may_tell_apart = not is_elementwise(node) and not may_be_constant and bool(here)
        for position, name, below in _kept_inputs(entry, node, bool(here)):
            leaf = None if below is None else number.get(below, -1)
            if leaf is None or (leaf >= 0 and leaf not in leaves):
                tells_apart = may_tell_apart and here.issuperset(at for at in others if at != position)
                uses.append(DataUse(i, position, name, leaf, outs, tells_apart))
    return uses


def _saved_names(node: Node) -> list[str]:
    """Return torch's names for what an op saves that takes an input without a gradient; none of a Python Function."""
    kind = kind_of(node)
    takes_data = not kind.is_custom and any(below is None for below, _ in node.next_functions)
    return [name.removeprefix("_raw_saved_") for name in kind.tensors] if takes_data else []


def _kept_inputs(entry: OpEntry, node: Node, uses_shared: bool) -> list[tuple[int, str, Node | None]]:
    """Return the inputs that an op keeps: position, torch's name, and the node that made each."""
    edges = node.next_functions
    # Ids into a shared table are data; those into rows of samples only say where these go.
    if entry.ids and uses_shared:
        return [(IDS, entry.ids, None)]
    return [(i, saved, edges[i][0]) for i, saved in entry.keeps.items() if i < len(edges)]


@dataclass(eq=False)
class DataRows:
    """For each tensor of data, which sample its elements are used for.

    Attributes:
        known: what is no data.
        nodes: all ops of the graph, by number.
        packed: the ops with saved-tensor hooks before what they keep.
        waiting: what these keep, to be noted when it is unpacked.
    """

    known: ModelTensors
    nodes: Sequence[Node]
    packed: set[Node]
    waiting: dict[Node, list[DataUse]] = field(default_factory=dict)
    _seen: dict[int, list[tuple[Tensor, Owners, Node]]] = field(default_factory=dict)
    _conflict: tuple[Tensor, Node, Node] | None = None

    def add(self, uses: Iterable[DataUse]) -> None:
        """Note which elements of data ops use for which samples."""
        for use in uses:
            node = self.nodes[use.op]
            if use.leaf is not None and not self.known.is_input(self.nodes[use.leaf]):
                continue
            if node in self.packed:
                self.waiting.setdefault(node, []).append(use)
            else:
                self._note(use, node, engine.saved(node, use.name))

    def add_packed(self, node: Node, saved: Callable[[str], Any]) -> None:
        """Note the same of an op whose data was packed, given how to get it."""
        for use in self.waiting.pop(node, ()):
            self._note(use, node, saved(use.name))

    def add_waiting(self) -> None:
        """Note the same of all ops whose data is still packed."""
        for node in list(self.waiting):
            self.add_packed(node, partial(engine.saved, node))

    def _note(self, use: DataUse, node: Node, tensor: Any) -> None:
        if isinstance(tensor, tuple | list):  # of ids for each dimension
            tensor = tensor[0] if not any(one is not None for one in tensor[1:]) else None
        if not isinstance(tensor, Tensor) or (use.position == IDS and tensor.dtype in (torch.bool, torch.uint8)):
            return
        if use.position == UNKNOWN:
            if tensor.is_floating_point() and not tensor.requires_grad and self.known.may_hold_samples(tensor.shape):
                self._suspect(tensor, node, node)
            return
        owners = use.owners(node, tuple(tensor.shape))
        memory = graph.memory_of(tensor)
        if not owners.is_proved and use.tells_apart:
            self._suspect(tensor, node, node)
        if memory is None or owners.is_empty:
            return
        if not tensor.is_contiguous():
            if _is_expanded(tensor):
                return
            if _overlaps(tensor) and bool((_by_place(tensor, owners) == MIXED).any()):
                self._suspect(tensor, node, node)
        before = self._seen.setdefault(memory, [])
        for other, others, first in before:
            if _differ(tensor, owners, other, others):
                self._suspect(tensor, first, node)
        before.append((tensor, owners, node))

    def _suspect(self, tensor: Tensor, first: Node, second: Node) -> None:
        """Note two ops that use a tensor for different samples, which is a conflict if it is data."""
        if self._conflict is None and self.known.is_data(tensor):
            self._conflict = (tensor, first, second)

    def has_owners_in(self, tensor: Tensor) -> bool:
        """Return whether rows of this tensor are used for one sample each."""
        return any(owners.is_proved for _, owners, _ in self._seen.get(graph.memory_of(tensor) or 0, ()))

    def refuse_conflict(self) -> None:
        """Refuse data whose rows are used for one sample here and for another one there.

        Raises:
            BatchCouplingError: there are such rows.
        """
        if self._conflict is not None:
            (tensor, first, second), advice = self._conflict, ""
            data = f"a row of data, in a tensor of shape {tuple(tensor.shape)},"
            once = f"`{graph.op(first)}` uses {data} for several samples"
            if entry_of(first) is None:
                once, advice = (
                    f"`{graph.op(first)}` may use {data} for several samples: it is not known how",
                    _UNKNOWN_OP,
                )
            twice = f"{data} is used for one sample by `{graph.op(first)}` and for another by `{graph.op(second)}`"
            raise coupling_error(once if first is second else twice, graph.op(second), "", advice)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether a tensor was expanded: what stands for a whole dimension is no sample's own."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _overlaps(tensor: Tensor) -> bool:
    """Return whether one place in memory stands for several elements, as in sliding windows."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _differ(a: Tensor, of_a: Owners, b: Tensor, of_b: Owners) -> bool:
    geometry = [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in (a, b)]
    if geometry[0] == geometry[1]:
        if of_a is of_b:
            return False
        x, y = of_a.ids, of_b.ids
    else:
        unit = min(a.element_size(), b.element_size())  # one memory may be seen as real and as complex numbers
        x, y = (
            _by_place(t, owners).repeat_interleave(t.element_size() // unit) for t, owners in ((a, of_a), (b, of_b))
        )
        x, y = x[: len(y)], y[: len(x)]
    return bool(((x != y) & (x != UNREACHED) & (y != UNREACHED)).any())


def _by_place(tensor: Tensor, owners: Owners) -> Tensor:
    """Return the owner of each place of the tensor's memory; mixed where it stands for elements of several samples."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = int(tensor.storage_offset()) + last + 1
    places = torch.arange(count, device="cpu").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    ids = owners.ids.expand(tensor.shape)
    places, ids = places[ids != UNREACHED], ids[ids != UNREACHED]
    owner = torch.full((count,), UNREACHED, dtype=torch.int32, device="cpu")
    owner.scatter_reduce_(0, places, ids, "amax")
    owner[places[owner[places] != ids]] = MIXED
    return owner


_UNKNOWN_OP = "Write it with other ops, or pass allow_coupling=True if each sample uses rows of its own."
_CAUSES = (
    "Batch normalisation in training mode does this (call model.eval(), or use GroupNorm), and so do losses over the "
    "whole batch, and losses of tokens that lie in one row (pass losses.reshape(sequences, tokens); they are summed). "
    "Pass allow_coupling=True to get the gradient of each loss as it is. (A tensor that is neither a parameter nor a "
    "registered buffer may be data: register constants, such as a table of positions, as buffers; for a mask computed "
    "from a weight, allow_coupling=True is correct.)"
)


def coupling_error(what: str, op: str, where: str, advice: str = "") -> BatchCouplingError:
    """Return the error about losses that depend on other samples, with what to do if that is known."""
    text = f"per_sample: {what}, so one sample has no gradient of its own. {advice or _CAUSES}"
    return BatchCouplingError(text, op, where)
