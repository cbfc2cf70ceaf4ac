"""Find models in which the data of one sample enters the loss of another.

Two things give that away. A value that samples share may be made from data of the batch, not from parameters alone. And
the rows of one tensor of data may be used for one sample here and for another one there.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch.nodes import edge_shape, output_shapes
from ..._torch.saved import kind_of
from ...errors import BatchCouplingError
from .. import engine, tracing
from ..engine import Losses
from ..layout import Owners
from ..ops.elementwise import is_elementwise
from ..ops.table import Step, base_name, entry_of
from ..ops.views import repeat
from ..owners.prove import prove, reached
from ..owners.use_sites import UseSite
from .data_rows import DataRows, ModelTensors, coupling_error

# Something that an op read besides what it differentiates: the op, or the leaf that it is; its shape, as far as it is
# recorded; and the tensor, if the op kept it.
Constant: TypeAlias = tuple[Node, tuple[int, ...], Tensor | None]


def constants(value: GradientEdge, known: ModelTensors) -> list[Constant]:
    """Return what went into a shared value besides parameters and buffers."""
    if graph.is_leaf(value.node):
        return []
    others: list[Constant] = []
    for node in reached(value):
        if graph.is_leaf(node):
            leaf = [graph.leaf_tensor(node)] if known.is_input(node) else []
            others += [(node, tuple(x.shape), x) for x in leaf]
        else:
            kept = [x for x in engine.saved_tensors(node) if x.grad_fn is None and known.is_data(x)]
            others += [(node, tuple(x.shape), x) for x in kept] or _unsaved(node)
    return others


def may_hold_constants(value: GradientEdge, parameters: Container[Node]) -> bool:
    """Return whether `constants` could find anything in some graph of the same signature."""
    # Most shared values are a transposed weight: nothing below keeps anything, and who is reached need not be asked.
    if not any(_may_keep(node, parameters) for node in graph.walk([value])):
        return False
    return any(_may_keep(node, parameters) for node in reached(value))


def partly_used_ops(root: Tensor, sample_of: Sequence[int], *, by_indices: bool = False) -> set[Node]:
    """Return the ops of which samples use different parts: some elements by other samples than the rest.

    So are the steps of a series of which each sample takes a window. A table that all samples share is used as a whole.
    Samples are told apart by one binary digit of their number at a time.
    """
    uneven: set[Node] = set()
    for digit in range(max(sample_of, default=0).bit_length()):
        owners = prove(root, [sample >> digit & 1 for sample in sample_of], by_indices=by_indices)
        uneven |= {node for node, outs in owners.items() if any(one.is_uneven for one in outs)}
    return uneven


def _may_keep(node: Node, parameters: Container[Node]) -> bool:
    kind = kind_of(node)
    if kind.is_leaf:
        return node not in parameters
    return kind.is_custom or bool(kind.tensors) or any(below is None for below, _ in node.next_functions)


def _unsaved(node: Node) -> list[Constant]:
    """Return an operand that was not kept, where the shape of the result gives it away."""
    if all(below is not None for below, _ in node.next_functions):
        return []
    shape = graph.describe(node)[0].shape
    if base_name(node) in ("Cat", "Stack"):
        return [(node, shape, None)]
    inputs = [edge_shape(GradientEdge(below, nr)) for below, nr in node.next_functions if below is not None]
    if base_name(node) in ("Add", "Sub", "Rsub") and max(prod(one) for one in inputs) < prod(shape):
        return [(node, shape, None)]
    return []


def refuse_shared_data(
    cuts: Sequence[UseSite],
    owners: Mapping[int, tuple[Owners, ...]],
    rows: DataRows,
    is_partly_used: Callable[[Node], bool],
) -> None:
    """Refuse a shared value that is made from data of the batch.

    Args:
        cuts: the uses of shared values.
        owners: owners of the outputs of the ops there.
        rows: which rows of data are used for which sample.
        is_partly_used: whether samples use different parts of what an op made; asked last, since it takes long.

    Raises:
        BatchCouplingError: the loss of one sample depends on another.
    """
    for cut in cuts:
        others = constants(GradientEdge(rows.nodes[cut.value], cut.output_nr), rows.known)
        # The op may take rows of the value for one sample each, so that the value has rows of samples.
        taken_apart = others and Step(rows.nodes[cut.node], owners[cut.node], cut.position, cut.shape).sends().varies
        if taken_apart or any(_is_batch(one, cut, rows, is_partly_used) for one in others):
            raise _refusal(cut, rows)


def _is_batch(one: Constant, cut: UseSite, rows: DataRows, is_partly_used: Callable[[Node], bool]) -> bool:
    """Return whether a constant may hold data of each sample: rows, alone, folded or second, or parts that overlap."""
    node, shape, tensor = one
    if tensor is not None and rows.has_owners_in(tensor):
        return True
    of_samples = rows.known.may_hold_samples(shape)
    if of_samples and rows.known.rows not in shape[:2]:
        of_samples = not _is_broadcast(cut, rows.nodes[cut.node])
    if not of_samples and not is_partly_used(node):
        return False
    value = None if tensor is None else tracing.constant(tensor)  # looked at last: on a device that is to wait
    return value is None or not _is_table_of_positions(value)


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


def _is_broadcast(cut: UseSite, node: Node) -> bool:
    """Return whether an elementwise op lays the value out over samples, as it does with a table of positions."""
    smaller = prod(cut.shape) < prod(graph.describe(node)[0].shape)
    return smaller and is_elementwise(node)


def _refusal(cut: UseSite, rows: DataRows) -> BatchCouplingError:
    nodes = rows.nodes
    made_from = [graph.leaf_tensor(nodes[leaf]) for leaf in cut.leaves]
    names = [name for name, p in rows.known.parameters.items() if any(p is leaf for leaf in made_from)]
    beneath = f"`{names[0]}`" + (f" and {len(names) - 1} more" if names[1:] else "") if names else "parameters"
    what = f"`{cut.op}` mixes the samples of the batch"
    if is_elementwise(nodes[cut.node]):  # which mixes nothing: it was done below, or by another use
        maker = graph.op(nodes[cut.value])
        what = f"the output of `{maker}` that `{cut.op}` uses depends on several samples of the batch"
    what = f"{what}. Values computed with {beneath} from one sample enter the losses of other samples"
    return coupling_error(what, cut.op, names[0] if names else "")


def is_used_by_rows(
    leaf: Node, cuts: Iterable[UseSite], losses: Losses, owners: Mapping[Node, tuple[Owners, ...]]
) -> bool:
    """Return whether rows of an input, or of what was made from it for several samples, belong to one sample each.

    A mask that all samples share has none, nor has a table that is laid out over them.

    Args:
        leaf: the input.
        cuts: the uses of values that were made from parameters.
        losses: what is differentiated.
        owners: owners of the outputs of every op.
    """
    shared: dict[Node, set[int]] = {}
    for cut in cuts:
        shared.setdefault(losses.scan.nodes[cut.node], set()).add(cut.position)
    made = {leaf: None}
    frontier = [leaf]
    while frontier:
        value = frontier.pop()
        shapes = output_shapes([value])[value]
        for op, position, output_nr in losses.read.consumers[value]:
            outs = owners.get(op)
            if outs is None or op in made:
                continue
            if Step(op, outs, position, shapes[output_nr]).sends().varies:
                return True
            if not all(one.is_proved for one in outs):
                made[op] = None
                frontier.append(op)
            elif _tells_apart(op, outs, made, shared.get(op, set())):
                return True
    return False


def _tells_apart(node: Node, outs: tuple[Owners, ...], made: Mapping[Node, None], shared: set[int]) -> bool:
    """Return whether outputs belong to different samples though all that an op computes with is shared by them."""
    entry = entry_of(node)
    if is_elementwise(node) or not any(one.varies for one in outs):
        return False
    if entry is not None and (entry.ids or entry.owners is repeat):
        return False
    beneath = [below for below, _ in node.next_functions]
    # What an op does not keep there is a weight that was left out, not data.
    may_be_data = range(len(beneath)) if entry is None or not entry.keeps else entry.keeps
    if any(beneath[i] is None for i in may_be_data if i < len(beneath)):
        return False
    return all(below is None or below in made or i in shared for i, below in enumerate(beneath))
