"""Which part of a module's inputs and outputs belongs to which sample, for the drop-in."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

from .. import graph
from ..errors import CallArgumentError
from . import engine
from .engine import Losses
from .gate.unsupported import refuse_unsupported
from .layout import Owners
from .owners.observe import observe
from .owners.prove import prove

# A tensor with a batch dimension, or a packed sequence, whose rows each belong to one sample.
Value: TypeAlias = Tensor | PackedSequence


def tensor_of(value: Value) -> Tensor:
    """Return the tensor itself, or the data of a packed sequence."""
    return value.data if isinstance(value, PackedSequence) else value


def with_tensor(value: Value, tensor: Tensor) -> Value:
    """Return another tensor, or a packed sequence with other data."""
    return value._replace(data=tensor) if isinstance(value, PackedSequence) else tensor


def _owner_of_row(packed: PackedSequence) -> Tensor:
    rows = torch.cat([torch.arange(int(n)) for n in packed.batch_sizes])
    order = packed.sorted_indices
    return rows if order is None else order.to(rows.device)[rows]


def _dims(value: Value, count: int, first: int) -> list[int]:
    """Return the dimensions that may hold the samples, the usual one first; 0 stands for packed rows."""
    if isinstance(value, PackedSequence):
        return [0]
    dims = [dim for dim, size in enumerate(value.shape) if size == count]
    return sorted(dims, key=lambda dim: dim != first)


def _sums(value: Value, gradient: Tensor, dim: int, count: int) -> Tensor:
    """Return one number per sample whose gradient at the tensor is the given one."""
    parts = (tensor_of(value) * gradient.detach().conj()).movedim(dim, 0)
    parts = parts.real if parts.is_complex() else parts
    rows = parts.reshape(len(parts), -1).sum(1)
    if not isinstance(value, PackedSequence):
        return rows
    return rows.new_zeros(count).index_add(0, _owner_of_row(value).to(rows.device), rows)


def losses_of(outputs: Sequence[tuple[Value, Tensor]], inputs: Sequence[Value], count: int, first: int) -> Tensor:
    """Return one number per sample whose gradient is what backward was given for it.

    Args:
        outputs: with the gradient at each.
        inputs: as the module got them.
        count: how many samples there are.
        first: the dimension that holds the samples, where nothing says otherwise.
    """
    possible = [_dims(value, count, first) for value, _ in outputs]
    usual = tuple(0 if isinstance(value, PackedSequence) else first for value, _ in outputs)
    for dims in product(*possible):
        with torch.enable_grad():
            parts = [_sums(value, g, dim, count) for (value, g), dim in zip(outputs, dims, strict=True)]
            losses = torch.stack(parts).sum(0)
        if count == 1 or _fits(losses, inputs, count, first, dims == usual):
            return losses
    shapes = [tuple(tensor_of(value).shape) for value, _ in outputs]
    raise CallArgumentError(
        f"call_for_per_sample_grads: no dimension of the outputs, of shapes {shapes}, separates {count} samples as "
        f"dimension {first} of the inputs does. Let the module return one entry per sample."
    )


def _fits(losses: Tensor, inputs: Sequence[Value], count: int, first: int, usual: bool) -> bool:
    """Return whether each loss depends on its own sample of the inputs and on no other.

    An input that all samples share, such as a mask, says nothing, and nor does one without a gradient; where none says
    anything, the usual dimension is taken, unless all that says something is shared.
    """
    split = Losses(losses, range(count), count)
    refuse_unsupported(split, {})
    places = dict(_places_of(inputs, split))
    owners = _owners_at(places, split)
    said = supported = shared = False
    for node, value in places.items():
        outs = owners[node]
        shared |= outs is None
        if outs is None or outs[0].is_empty:
            continue
        possible = _dims(value, count, first)
        dims = [dim for dim in possible if _match(value, dim, outs[0], count)]
        if not dims:
            return False
        said = True
        # A state of a recurrent layer has its samples elsewhere, and what it says counts if it can say nothing else.
        supported |= isinstance(value, PackedSequence) or first in dims or first not in possible
    return supported if said else usual and not shared


def _owners_at(nodes: Iterable[Node], losses: Losses) -> dict[Node, tuple[Owners, ...] | None]:
    """Return the owners at some nodes: as structure proves them, or else as the engine finds them."""
    proved = {node: owners for node, owners in prove(losses.root, losses.sample_of).items() if owners[0].is_proved}
    known = {node: proved[node] for node in nodes if node in proved}
    return {**known, **observe(losses, [node for node in nodes if node not in proved])}


def _match(value: Value, dim: int, owners: Owners, count: int) -> bool:
    """Return whether the owners are those that an input has if this dimension holds the samples."""
    tensor = tensor_of(value)
    rows = _owner_of_row(value) if isinstance(value, PackedSequence) else torch.arange(count)
    expected = rows.view(-1, *(1,) * (tensor.dim() - dim - 1))
    return bool(((owners.ids == expected) | (owners.ids < 0)).all())


def _places_of(inputs: Sequence[Value], losses: Losses) -> Iterator[tuple[Node, Value]]:
    """Yield where inputs stand in the graph: leaves, and for ids what was looked up with them."""
    yield from ((graph.edge_of(tensor_of(one)).node, one) for one in inputs if tensor_of(one).requires_grad)
    by_memory = {tensor_of(one).data_ptr(): one for one in inputs if not tensor_of(one).requires_grad}
    for node in losses.scan.nodes:
        if graph.op(node) != "EmbeddingBackward0" or engine.is_packed(node):
            continue
        indices = engine.saved(node, "indices")
        ids = by_memory.get(indices.data_ptr())
        if ids is not None and tensor_of(ids).numel() == indices.numel() and tensor_of(ids).is_contiguous():
            width = graph.describe(node)[0].shape[-1]
            yield node, with_tensor(ids, tensor_of(ids)[..., None].expand(*tensor_of(ids).shape, width))
