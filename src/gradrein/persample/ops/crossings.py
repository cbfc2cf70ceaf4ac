"""Owners where plain tensors become DTensors, of which each rank has a shard, and back."""

from torch import Tensor

from ..._torch.dtensor import is_crossing, is_dtensor, shard_ranges, sharded_dims, spec_of, stored_shard
from ..._torch.signature import Scan
from ...errors import UnsupportedOperationError
from ..layout.owners import MIXED, Owners


def across(owners: Owners, shape: tuple[int, ...]) -> Owners:
    """Return the owners of a whole tensor given those of the shard here, or the other way round.

    All ranks have recorded the same ops, so where owners do not vary along the dimension that is cut, those of one
    shard are those of the others.
    """
    if len(owners.shape) != len(shape):
        return Owners.all(MIXED, shape)
    sizes = zip(owners.ids.shape, owners.shape, shape, strict=True)
    cut_between_samples = any(varying > 1 and before != after for varying, before, after in sizes)
    return Owners.all(MIXED, shape) if cut_between_samples else Owners(owners.ids, shape)


def shard_here(tensor: Tensor, owners: Owners) -> tuple[Tensor, Owners]:
    """Return the shard of a DTensor that is here and its owners, given those of the whole; a plain tensor as it is."""
    if not is_dtensor(tensor):
        return tensor, owners
    spec, shard = spec_of(tensor), stored_shard(tensor)
    dims = sharded_dims(spec.placements)
    if dims is None:
        return shard, Owners.all(MIXED, tuple(shard.shape))
    for dim, (start, size) in enumerate(shard_ranges(tensor.shape, spec.mesh, dims)):
        owners = owners.part(dim, start, size)
    return shard, owners


def refuse_asking(scan: Scan) -> None:
    """Refuse to ask the engine about a graph of DTensors: each rank would see its shards only, and ask otherwise.

    Raises:
        UnsupportedOperationError: there are DTensors in the graph.
    """
    if any(map(is_crossing, scan.custom)) or any(map(is_dtensor, scan.leaves.values())):
        raise UnsupportedOperationError(
            "per_sample: the model is tensor parallel, and the structure of its graph does not prove which sample "
            "owns which elements of its DTensors: it has a hook, an unknown op or collective, a batch that is split "
            "over the ranks of the mesh, or losses that depend on other samples. Remove that, or distribute the model "
            "with fully_shard or DistributedDataParallel alone."
        )
