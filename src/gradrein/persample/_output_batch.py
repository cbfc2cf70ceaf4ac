"""Which part of a module's inputs and outputs belongs to which sample, for the drop-in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

from .. import graph
from ..errors import CallArgumentError
from . import engine
from .engine import Losses
from .gate.unsupported import refuse_unsupported
from .layout.samples import SampleLayout
from .owners.probe import probe
from .owners.prove import prove


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor among the inputs or outputs of a module.

    Attributes:
        tensor: the tensor.
        owner_of_row: for the data of a packed sequence the owner of each row; None for a tensor with a batch dimension.
    """

    tensor: Tensor
    owner_of_row: Tensor | None = None

    @staticmethod
    def of(unit: Tensor | PackedSequence) -> "Value":
        """Return the tensor itself, or the data of a packed sequence with their owners."""
        if isinstance(unit, Tensor):
            return Value(unit)
        rows = torch.cat([torch.arange(int(n)) for n in unit.batch_sizes])
        order = unit.sorted_indices
        return Value(unit.data, rows if order is None else order.to(rows.device)[rows])

    def ways(self, count: int, first: int) -> list[int]:
        """Return the dimensions that may hold the samples, the usual one first; 0 stands for packed rows."""
        if self.owner_of_row is not None:
            return [0]
        dims = [dim for dim, size in enumerate(self.tensor.shape) if size == count]
        return sorted(dims, key=lambda dim: dim != first)

    def owners(self, dim: int, count: int) -> Tensor:
        """Return the owner of each element if this dimension holds the samples."""
        rows = torch.arange(count) if self.owner_of_row is None else self.owner_of_row
        shape = self.tensor.shape
        return rows.view(-1, *(1,) * (len(shape) - dim - 1)).expand(shape).reshape(-1)

    def sums(self, gradient: Tensor, dim: int, count: int) -> Tensor:
        """Return one number per sample whose gradient at the tensor is the given one."""
        parts = (self.tensor * gradient.detach().conj()).movedim(dim, 0)
        parts = parts.real if parts.is_complex() else parts
        rows = parts.reshape(len(parts), -1).sum(1)
        if self.owner_of_row is None:
            return rows
        return rows.new_zeros(count).index_add(0, self.owner_of_row.to(rows.device), rows)


def losses_of(outputs: Sequence[tuple[Value, Tensor]], inputs: Sequence[Value], count: int, first: int) -> Tensor:
    """Return one number per sample whose gradient is what backward was given for it.

    Args:
        outputs: with the gradient at each.
        inputs: as the module got them.
        count: how many samples there are.
        first: the dimension that holds the samples, where nothing says otherwise.
    """
    ways = [value.ways(count, first) for value, _ in outputs]
    for (value, _), found in zip(outputs, ways, strict=True):
        if not found:
            raise CallArgumentError(
                f"call_for_per_sample_grads: an output of shape {tuple(value.tensor.shape)} has no dimension of the "
                f"batch size {count}, so its samples cannot be separated."
            )
    for dims in product(*ways):
        with torch.enable_grad():
            parts = [value.sums(g, dim, count) for (value, g), dim in zip(outputs, dims, strict=True)]
            losses = torch.stack(parts).sum(0)
        usual = all(
            dim == found[0] and (dim == first or value.owner_of_row is not None)
            for dim, found, (value, _) in zip(dims, ways, outputs, strict=True)
        )
        if count == 1 or _fits(losses, inputs, count, first, usual):
            return losses
    shapes = [tuple(value.tensor.shape) for value, _ in outputs]
    raise CallArgumentError(
        f"call_for_per_sample_grads: no dimension of the outputs, of shapes {shapes}, separates the samples as "
        f"dimension {first} of the inputs does. Let the module return one entry per sample."
    )


def _fits(losses: Tensor, inputs: Sequence[Value], count: int, first: int, usual: bool) -> bool:
    """Return whether each loss depends on its own sample of the inputs and on no other.

    An input that all samples share, such as a mask, says nothing, and nor does one without a gradient; where none says
    anything, the usual dimension is taken, unless all that can be asked is shared.
    """
    split = Losses(losses, torch.arange(count), count)
    refuse_unsupported(split, {})
    asked = dict(_places_of(inputs, split))
    found = _owners_at(asked, split)
    said = supported = shared = False
    for node, value in asked.items():
        layouts = found[node]
        shared |= layouts is None
        if layouts is None or layouts[0].is_empty:
            continue
        dims = [dim for dim in value.ways(count, first) if _match(value, dim, layouts[0], count)]
        if not dims:
            return False
        said = True
        # A state of a recurrent layer has its samples elsewhere, and what it says counts if it can say nothing else.
        supported |= value.owner_of_row is not None or first in dims or first not in value.ways(count, first)
    return supported if said else usual and not shared


def _owners_at(nodes: Iterable[Node], losses: Losses) -> dict[Node, tuple[SampleLayout, ...] | None]:
    """Return the owners at some nodes: as structure proves them, or else as the engine finds them."""
    proved = {node: owners for node, owners in prove(losses.root, losses.sample_of).items() if owners[0].is_proved}
    found = {node: (proved[node][0].layout(losses.samples),) for node in nodes if node in proved}
    return {**found, **probe(losses, [node for node in nodes if node not in proved])}


def _match(value: Value, dim: int, layout: SampleLayout, count: int) -> bool:
    expected = value.owners(dim, count).to(value.tensor.device)
    # Where gradients are zero, a block may claim elements that were not seen.
    owners = layout.owner_of_each(value.tensor.numel(), value.tensor.device) if layout.seen is None else layout.seen
    return not owners.numel() or bool(((owners == expected) | (owners < 0)).all())


def _places_of(inputs: Sequence[Value], losses: Losses) -> Iterator[tuple[Node, Value]]:
    """Yield where inputs stand in the graph: leaves, and for ids what was looked up with them."""
    ids = {value.tensor.data_ptr(): value for value in inputs if not value.tensor.requires_grad}
    yield from ((graph.edge_of(value.tensor).node, value) for value in inputs if value.tensor.requires_grad)
    for node in losses.scan.nodes:
        if graph.op(node) != "EmbeddingBackward0" or engine.is_packed(node):
            continue
        indices = engine.saved(node, "indices")
        value = ids.get(indices.data_ptr())
        if value is not None and value.tensor.numel() == indices.numel() and value.tensor.is_contiguous():
            width = graph.describe(node)[0].shape[-1]
            looked_up = value.tensor[..., None].expand(*value.tensor.shape, width)
            yield node, Value(looked_up, value.owner_of_row)
