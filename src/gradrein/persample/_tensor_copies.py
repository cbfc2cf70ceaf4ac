"""What ranks of a tensor-parallel mesh hold alike: the losses, and what ops saved that every rank has whole.

Gradients are computed from these values and from shards. Where each rank computes them for itself (inputs, dropout
masks, plain layers) nothing makes them the same: other samples on another rank, or a seed of its own, give gradients
that are those of no model. So they are compared: bit by bit, as ranks that compute the same get the same bits, by one
number for all of them. Only where that differs are the values sent, and may differ by rounding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from .._distributed.agreement import Agreement
from .._distributed.checksums import checksum, words
from .._distributed.meshes import Group
from .._torch.dtensor import is_dtensor, spec_of, stored_shard
from .._torch.saved import is_unowned_output_message
from .._torch.signature import kind_of
from . import engine
from ._tensor_regions import Regions
from ._tensor_versions import refuse_changed
from .engine import Losses
from .ops.table import moves_by_index

# Where attention keeps its random state, which without dropout is any memory.
_RANDOM = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})
# Where libraries keep what their backward needs, between bytes that nobody has written; the outputs are compared.
_WORKSPACES = frozenset(
    {
        ("MkldnnRnnLayerBackward0", "result3"),
        ("CudnnRnnBackward0", "result3"),
        ("MiopenRnnBackward0", "result3"),
        ("CudnnBatchNormBackward0", "result3"),
    }
)


class Copy(NamedTuple):
    """A tensor that ranks are to hold alike.

    Attributes:
        node: the op that saved it; None for losses and parameters.
        name: torch's name for it.
        number: which of several it is that were saved under one name.
        along: the dimensions of the mesh along which it has to be the same.
        bits: its checksum.
        kind: its number in Python, its shape, and how it lies, for errors.
        held: the tensor itself, where no op saved it.
    """

    node: Node | None
    name: str
    number: int
    along: tuple[int, ...]
    bits: Tensor
    kind: tuple[int, tuple[int, ...], Any]
    held: Tensor | None = None


def copies_of_parameters(leaves: Iterable[Any], dims: Sequence[int], known: dict[Any, Tensor]) -> list[Copy]:
    """Return the parameters that are DTensors, along the dimensions of the mesh in which each rank has all of them."""
    found = []
    for i, leaf in enumerate(leaves):
        along = tuple(dim for dim in dims if is_dtensor(leaf) and spec_of(leaf).placements[dim].is_replicate())
        if along:
            kind = id(leaf), tuple(leaf.shape), spec_of(leaf)
            found.append(Copy(None, "a parameter", i, along, _sum(leaf.detach(), known), kind, stored_shard(leaf)))
    return found


def copy_of_losses(losses: Losses, dims: Sequence[int]) -> Copy:
    """Return the losses, which every rank has whole."""
    return Copy(None, "the losses", 0, tuple(dims), checksum(losses.root), (0, (), None), losses.root)


def copies(nodes: Iterable[Node], regions: Regions, dims: Sequence[int], known: dict[Any, Tensor] | None) -> list[Copy]:
    """Return what ops saved and ranks are to hold alike.

    Args:
        nodes: the ops, in the same order on every rank.
        regions: what their outputs are.
        dims: the dimensions of the mesh.
        known: checksums of what lies in memory, filled on the way: most is saved by several ops. None where saved
            values come and go.

    Raises:
        InplaceModifiedError: a value was changed in place.
    """
    return [
        Copy(node, name, i, along, _sum(value, known), (id(value), tuple(value.shape), spec_of(value)))
        for node in nodes
        for name, i, value in _saved(node)
        if (along := _along(node, name, value, regions, dims))
    ]


def _saved(node: Node) -> Iterator[tuple[str, int, Tensor]]:
    about = kind_of(node)
    if about.is_custom or about.is_leaf:
        return
    for raw in about.tensors:
        name = raw.removeprefix("_raw_saved_")
        found = _read(node, name)
        for i, value in enumerate(found if isinstance(found, tuple | list) else [found]):
            if isinstance(value, Tensor):
                refuse_changed(node, name, value)
                yield name, i, value


def _read(node: Node, name: str) -> Any:
    try:
        return engine.saved(node, name)
    except RuntimeError as error:
        if is_unowned_output_message(str(error)):
            return None
        raise


def _along(node: Node, name: str, value: Any, regions: Regions, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of the mesh along which a saved value has to be the same."""
    if (graph.op(node), name) in _WORKSPACES or (name in _RANDOM and not getattr(node, "_saved_dropout_p", 1)):
        return ()
    if is_dtensor(value):
        places = spec_of(value).placements
        return tuple(dim for dim in dims if places[dim].is_replicate())
    if moves_by_index(node) and not (value.is_floating_point() or value.is_complex()):
        return tuple(dims)  # whose the elements are would differ from rank to rank
    return tuple(dim for dim in dims if dim not in regions.varies.get(node, ()))


def _sum(value: Any, known: dict[Any, Tensor] | None) -> Tensor:
    shard = stored_shard(value)
    if known is None or shard.layout is not torch.strided:
        return checksum(shard)
    place = (shard.data_ptr(), shard.dtype, shard.shape, shard.stride())
    if place not in known:
        known[place] = checksum(shard)
    return known[place]


def number_of(found: Iterable[Copy], dim: int) -> Tensor:
    """Return one number for all that has to be the same along a dimension of the mesh, in words."""
    shared = [copy for copy in found if dim in copy.along]
    return words(checksum(_together(shared))[None])


def _together(found: Sequence[Copy]) -> Tensor:
    """Return checksums in one tensor, for which a device is waited for once."""
    device = max((copy.bits.device for copy in found), key=lambda d: d.type != "cpu", default=torch.device("cpu"))
    return torch.stack([copy.bits.to(device) for copy in found]).cpu() if found else torch.zeros(0, dtype=torch.int64)


def first_difference(found: Iterable[Copy], dim: int, group: Group, agreement: Agreement) -> Copy | None:
    """Return the first copy that is not the same on the ranks of a group; None if all are, to rounding.

    All ranks of the group have to ask, and have recorded the same ops.
    """
    shared = [copy for copy in found if dim in copy.along]
    sent = words(_together(shared))
    differs = _spread(sent, group, agreement).view(-1, 2).any(1)
    for i in differs.nonzero().flatten().tolist():
        copy: Copy = shared[i]
        value = _value(copy.node, copy.name, copy.number) if copy.held is None else copy.held
        # A column of huge numbers must not hide that the others are those of another sample.
        is_data = value.grad_fn is None and not value.requires_grad
        shard = stored_shard(value.detach())
        shard = shard if shard.layout is torch.strided else shard.to_dense()
        if not _same_to_rounding(shard, group, agreement, each=is_data or copy.name == "the losses"):
            return copy
    return None


def _value(node: Node | None, name: str, index: int) -> Tensor:
    assert node is not None
    read = partial(engine.saved, node, name)
    found = engine.inside_engine(read) if engine.is_packed(node) else read()
    value: Tensor = found[index] if isinstance(found, tuple | list) else found
    return value


def _spread(values: Tensor, group: Group, agreement: Agreement) -> Tensor:
    """Return by how much values differ over the ranks of a group."""
    most, least = agreement.again(torch.cat([values, -values]), group, largest=True).chunk(2)
    return most + least


def _same_to_rounding(value: Tensor, group: Group, agreement: Agreement, *, each: bool) -> bool:
    """Compare the values of ranks that have computed them in another order, or have other samples.

    Args:
        value: that of this rank.
        group: the ranks.
        agreement: what they exchange.
        each: relative to each element; else to the largest of its row.
    """
    shape = torch.tensor([*value.shape, *[-1] * (16 - value.dim())], dtype=torch.float64)
    if bool(_spread(shape, group, agreement).any()) or not (value.is_floating_point() or value.is_complex()):
        return False
    eps: float = torch.finfo(value.dtype).eps ** 0.75  # a few roundings in half precision, some fifty in float32
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    rows = _rows(value.double().cpu(), each=each)
    odd = torch.stack([rows.isnan(), rows.isposinf(), rows.isneginf()]).double()
    if bool(_spread(odd.flatten(), group, agreement).any()):
        return False
    rows = rows.nan_to_num(0, 0, 0)
    spread = _spread(rows.flatten(), group, agreement).view_as(rows)
    sizes = rows.abs().amax(1, keepdim=True)
    size = agreement.again(sizes.flatten(), group, largest=True).view_as(sizes)
    return bool((spread <= eps * size).all())


def _rows(value: Tensor, *, each: bool) -> Tensor:
    if each:
        return value.reshape(-1, 1)
    return value.flatten(1) if value.dim() > 1 else value.reshape(1, -1)


def described(copy: Copy, names: Mapping[int, str]) -> str:
    """Return what a copy is, for errors."""
    number, shape, spec = copy.kind
    if copy.name == "the losses":
        return "the tensor of losses"
    if number in names:
        return f"`{names[number]}`, of which every rank has all,"
    what = "of which every rank has all" if spec is None else f"with placements {list(spec.placements)}"
    saved = "" if copy.node is None else f", which `{graph.op(copy.node)}` saved as `{copy.name}`,"
    return f"a tensor of shape {shape} {what}{saved}"
