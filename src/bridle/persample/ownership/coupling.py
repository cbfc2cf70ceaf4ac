"""Find models in which the data of one sample enters the loss of another.

Two things give that away. A value that samples share may be made from data of the batch, not from parameters alone. And
the rows of one tensor of data may be used for one sample here and for another one there.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ...errors import BatchCouplingError
from .. import _engine, tracing
from .cuts import UseSite, leaves_below
from .ops import MOVES, Step, base_name, elementwise
from .owners import NOBODY, Owners
from .prove import reached

# The inputs that an op keeps, by position and by torch's name for them.
_SAVED_INPUTS: dict[str, dict[int, str]] = {
    "Addmm": {1: "mat1", 2: "mat2"},
    "Mm": {0: "self", 1: "mat2"},
    "Bmm": {0: "self", 1: "mat2"},
    "Baddbmm": {1: "batch1", 2: "batch2"},
    "Convolution": {0: "input"},
    "NativeLayerNorm": {0: "input"},
    "NativeGroupNorm": {0: "input"},
    "NativeBatchNorm": {0: "input"},
    "MkldnnRnnLayer": {0: "input"},
    "Mul": {0: "self", 1: "other"},
    "Div": {0: "self", 1: "other"},
}


class Known:
    """What is no data: parameters and buffers. Looked up only when something might be."""

    def __init__(self, parameters: dict[str, Tensor], model: nn.Module | None, rows: int) -> None:
        self._parameters, self._model, self.rows = parameters, model, rows

    @cached_property
    def _storages(self) -> frozenset[int | None]:
        others = [] if self._model is None else [*self._model.parameters(), *self._model.buffers()]
        return frozenset(graph.memory_of(tensor) for tensor in (*self._parameters.values(), *others))

    @cached_property
    def _ids(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._parameters.items()}

    def name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter; None if it is none of those that were passed."""
        return self._ids.get(id(tensor))

    def is_data(self, tensor: Tensor) -> bool:
        """Return whether a tensor is neither a parameter nor a buffer, nor a part or a copy of one."""
        if tensor.numel() == 0 or isinstance(tensor, nn.Parameter) or graph.memory_of(tensor) in self._storages:
            return False
        value = tracing.constant(tensor)
        buffers = [] if self._model is None or value is None else self._model.buffers()
        return not any(one.shape == tensor.shape and torch.equal(one.to(tensor), tensor) for one in buffers)

    def is_input(self, node: Node) -> bool:
        """Return whether a leaf is an input whose gradient was asked for, rather than a parameter."""
        return graph.is_leaf(node) and self.is_data(graph.leaf_tensor(node))


@dataclass(frozen=True)
class Constant:
    """Something that an op read besides what it differentiates.

    Attributes:
        shape: its shape, as far as it is recorded.
        tensor: the tensor, if the op kept it.
    """

    shape: tuple[int, ...]
    tensor: Tensor | None = None


def constants(value: GradientEdge, known: Known) -> list[Constant]:
    """Return what went into a shared value besides parameters and buffers."""
    if graph.is_leaf(value.node):
        return []
    found: list[Constant] = []
    for node in reached(value):
        if graph.is_leaf(node):
            leaf = [graph.leaf_tensor(node)] if known.is_input(node) else []
            found += [Constant(tuple(x.shape), x) for x in leaf]
        else:
            kept = [x for x in _engine.saved_tensors(node) if x.grad_fn is None and known.is_data(x)]
            found += [Constant(tuple(x.shape), x) for x in kept] or _unsaved(node)
    return found


def may_hold_constants(value: GradientEdge, parameters: Container[Node]) -> bool:
    """Return whether `constants` could find anything in some graph of the same signature."""
    if graph.is_leaf(value.node):
        return False
    for node in reached(value):
        if graph.is_leaf(node):
            if node not in parameters:
                return True
        elif _engine.saves_tensors(node) or any(below is None for below, _ in node.next_functions):
            return True
    return False


def _unsaved(node: Node) -> list[Constant]:
    """Return an operand that was not kept, where the shape of the result gives it away."""
    if all(below is not None for below, _ in node.next_functions):
        return []
    shape = graph.describe(node)[0].shape
    if base_name(node) in ("Cat", "Stack"):
        return [Constant(shape)]
    inputs = [_edge_shape(GradientEdge(below, nr)) for below, nr in node.next_functions if below is not None]
    if base_name(node) in ("Add", "Sub", "Rsub") and max(prod(one) for one in inputs) < prod(shape):
        return [Constant(shape)]
    return []


def refuse_shared_data(
    cuts: Sequence[UseSite], owners: Mapping[Node, tuple[Owners, ...]], rows: "DataRows", known: Known
) -> None:
    """Refuse a shared value that is made from data of the batch.

    Raises:
        BatchCouplingError: the loss of one sample depends on another.
    """
    for cut in cuts:
        found = constants(cut.value, known)
        if found and (_taken_apart(cut, owners) or any(_is_batch(one, cut, rows, known) for one in found)):
            raise _refusal(cut, known)


def _taken_apart(cut: UseSite, owners: Mapping[Node, tuple[Owners, ...]]) -> bool:
    """Return whether the op takes rows of the value for one sample each, so that the value has rows of samples."""
    step = Step(cut.node, owners[cut.node], cut.position, _edge_shape(cut.value))
    return step.sends().varies


def _is_batch(one: Constant, cut: UseSite, rows: "DataRows", known: Known) -> bool:
    """Return whether a constant may hold one row per sample, alone, folded, or in the second dimension."""
    if one.tensor is not None and rows.has(one.tensor):
        return True
    value = None if one.tensor is None else tracing.constant(one.tensor)
    if value is not None and _is_table_of_positions(value):
        return False
    if known.rows in one.shape[:2]:
        return True
    return bool(one.shape) and one.shape[0] % known.rows == 0 and not _is_broadcast(cut)


def _is_table_of_positions(tensor: Tensor) -> bool:
    """Return whether a tensor of integers counts up along its last dimension, or depends on distances alone.

    Tokens of a batch might do either by chance where there are fewer than three.
    """
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.dim() == 0:
        return False
    if tensor.shape[-1] < 3:
        return False
    counts_up = bool((tensor.diff() == 1).all())
    square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]
    return counts_up or (square and bool((tensor[..., 1:, 1:] == tensor[..., :-1, :-1]).all()))


def _is_broadcast(cut: UseSite) -> bool:
    """Return whether an elementwise op lays the value out over samples, as it does with a table of positions."""
    smaller = prod(_edge_shape(cut.value)) < prod(graph.describe(cut.node)[0].shape)
    return smaller and MOVES.get(base_name(cut.node)) is elementwise


def _refusal(cut: UseSite, known: Known) -> BatchCouplingError:
    found = (known.name(graph.leaf_tensor(leaf)) for leaf in leaves_below(cut.value.node))
    names = [name for name in found if name is not None]
    beneath = f"`{names[0]}`" + (f" and {len(names) - 1} more" if names[1:] else "") if names else "parameters"
    op = graph.op(cut.node)
    what = f"`{op}` mixes the samples of the batch. What {beneath} made of one sample enters the losses of others"
    return _coupling(what, op, names[0] if names else "")


def shared_input(tensor: Tensor) -> BatchCouplingError:
    """Return the error about an input whose rows enter the losses of several samples."""
    return _coupling(f"rows of an input of shape {tuple(tensor.shape)} enter the losses of several samples", "", "")


def _coupling(what: str, op: str, where: str) -> BatchCouplingError:
    return BatchCouplingError(
        f"per_sample: {what}, so one sample has no gradient of its own. Batch normalisation in training does this "
        "(call model.eval(), or use GroupNorm), and so do losses over the whole batch. Pass allow_coupling=True to "
        "get the gradient of each loss as it is. (A constant, such as a table of positions, is not taken for data if "
        "it is a registered buffer.)",
        op,
        where,
    )


def _data_inputs(node: Node, known: Known) -> list[tuple[int, str]]:
    """Return the inputs of an op that are data and that it keeps: position and torch's name."""
    name = base_name(node)
    if name == "Embedding":
        return [(_IDS, "indices")]
    edges = node.next_functions
    kept = _SAVED_INPUTS.get(name, {}).items()
    return [(i, saved) for i, saved in kept if i < len(edges) and _is_data_edge(edges[i][0], known)]


# The ids of a look-up are no input that could have a gradient.
_IDS = -1


def _is_data_edge(below: Node | None, known: Known) -> bool:
    return below is None or known.is_input(below)


def _owners_of_data(node: Node, position: int, tensor: Tensor, outs: tuple[Owners, ...]) -> Owners:
    """Return whose rows of data an op takes."""
    shape = tuple(tensor.shape)
    if position == _IDS:
        found = outs[0].mixed([-1]).ids
        return Owners(found.reshape(found.shape[:-1]), shape)
    return Step(node, outs, position, shape).sends()


@dataclass(eq=False)
class DataRows:
    """For each tensor of data, which sample its elements are used for."""

    known: Known
    cuts: InitVar[Sequence[UseSite]]
    _seen: dict[int, list[tuple[Tensor, Owners, Node]]] = field(default_factory=dict)
    _conflict: tuple[Tensor, Node, Node] | None = None

    def __post_init__(self, cuts: Sequence[UseSite]) -> None:
        self._shared: dict[Node, set[int]] = {}
        for cut in cuts:
            self._shared.setdefault(cut.node, set()).add(cut.position)

    def add_all(self, owners: Mapping[Node, tuple[Owners, ...]]) -> None:
        """Note what ops use, except for what is packed."""
        for node, outs in owners.items():
            if not _engine.is_packed(node):
                self.add(node, outs, partial(_engine.saved, node))

    def add(self, node: Node, outs: tuple[Owners, ...], saved: Callable[[str], Any]) -> None:
        """Note which elements of data an op uses for which samples, given how to get what it saved."""
        for position, name in _data_inputs(node, self.known):
            tensor = saved(name)
            if isinstance(tensor, Tensor):
                self._note(tensor, _owners_of_data(node, position, tensor, outs), node)

    def _note(self, tensor: Tensor, owners: Owners, node: Node) -> None:
        memory = graph.memory_of(tensor)
        exact = owners.is_proved or MOVES.get(base_name(node)) is elementwise
        if not owners.is_proved and self._tells_samples_apart(node) and self.known.is_data(tensor):
            self._conflict = self._conflict or (tensor, node, node)
        if memory is None or not exact or owners.is_empty or _overlaps(tensor):
            return
        before = self._seen.setdefault(memory, [])
        for other, others, first in before:
            if _differ(tensor, owners, other, others) and self.known.is_data(tensor):
                self._conflict = self._conflict or (tensor, first, node)
        before.append((tensor, owners, node))

    def _tells_samples_apart(self, node: Node) -> bool:
        """Return whether only the data of an op can make its outputs belong to different samples.

        It can where everything else is shared. An elementwise op may also broadcast a constant.
        """
        shared = self._shared.get(node, set())
        others = [i for i, (below, _) in enumerate(node.next_functions) if below is not None]
        return MOVES.get(base_name(node)) is not elementwise and bool(shared) and shared.issuperset(others)

    def has(self, tensor: Tensor) -> bool:
        """Return whether rows of this tensor are used for one sample each."""
        return any(owners.is_proved for _, owners, _ in self._seen.get(graph.memory_of(tensor) or 0, ()))

    def refuse_conflict(self) -> None:
        """Refuse data whose rows are used for one sample here and for another one there.

        Raises:
            BatchCouplingError: there are such rows.
        """
        if self._conflict is not None:
            tensor, first, second = self._conflict
            data = f"a row of data, in a tensor of shape {tuple(tensor.shape)},"
            once = f"`{graph.op(first)}` uses {data} for several samples"
            twice = f"{data} is used for one sample by `{graph.op(first)}` and for another by `{graph.op(second)}`"
            raise _coupling(once if first is second else twice, graph.op(second), "")


def _overlaps(tensor: Tensor) -> bool:
    """Return whether one place in memory stands for several elements: then it is no sample's own."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _differ(a: Tensor, of_a: Owners, b: Tensor, of_b: Owners) -> bool:
    geometry = [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in (a, b)]
    if geometry[0] == geometry[1]:
        x, y = of_a.ids, of_b.ids
    else:
        first, second = _by_place(a, of_a), _by_place(b, of_b)
        size = min(len(first), len(second))
        x, y = first[:size], second[:size]
    return bool(((x != y) & (x != NOBODY) & (y != NOBODY)).any())


def _by_place(tensor: Tensor, owners: Owners) -> Tensor:
    """Return the owner of each byte-sized place of the tensor's memory, in units of its elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    parameter_forms = torch.full((tensor.storage_offset() + last + 1,), NOBODY, dtype=torch.int32)
    part = parameter_forms.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    part.copy_(owners.ids.expand(tensor.shape))
    return parameter_forms


def _edge_shape(edge: GradientEdge) -> tuple[int, ...]:
    if graph.is_leaf(edge.node):
        return tuple(graph.leaf_tensor(edge.node).shape)
    return graph.describe(edge.node)[edge.output_nr].shape
