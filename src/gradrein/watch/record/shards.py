"""Read this rank's shard of a weight or gradient, without communication."""

from typing import Any

from torch import Tensor

from ..._torch.dtensor import is_dtensor


def local_shard(t: Any) -> Tensor:
    """Return what this rank holds: all of a plain tensor, the local shard of a DTensor."""
    found = t.to_local() if is_dtensor(t) else t
    if type(found) is not Tensor and hasattr(found, "wait"):  # an asynchronous collective is still running
        found = found.wait()
    local: Tensor = found
    return local


def shard_index(t: Any) -> list[int] | None:
    """Return which shard of how many this rank holds, None of a plain tensor. Copies of a shard have its number."""
    if not is_dtensor(t):
        return None
    index, count = 0, 1
    coordinate = t.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in its mesh, and holds nothing of it
        return [0, 0]
    for at, size, placement in zip(coordinate, t.device_mesh.shape, t.placements, strict=True):
        if not placement.is_replicate():
            index, count = index * size + at, count * size
    return [index, count]


def is_primary_shard(t: Any, rank: int) -> bool:
    """Return whether this rank is the first that holds this shard. Sums over ranks count each shard there only."""
    if not is_dtensor(t):
        return rank == 0
    coordinate = t.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(at == 0 for at, placement in zip(coordinate, t.placements, strict=True) if placement.is_replicate())


def is_flattened(parameter: Tensor) -> bool:
    """Return whether it is a part of a parameter of torch's first FullyShardedDataParallel."""
    return getattr(parameter, "_fsdp_flattened", False)


def unmeasurable(parameter: Any, grad: Any) -> str | None:
    """Return why a gradient cannot be measured by its shards; None where it can."""
    if is_flattened(parameter):
        return (
            "torch's first FullyShardedDataParallel has flattened its parameter, and no tensor says which shard is "
            "here; use torch.distributed.fsdp.fully_shard"
        )
    found, wanted = ((t.device_mesh, t.placements) if is_dtensor(t) else None for t in (grad, parameter))
    if found == wanted:
        return None
    kinds = [str(layout[1]) if layout else "a plain tensor" for layout in (found, wanted)]
    layouts = f"it is laid out as {kinds[0]} and its parameter as {kinds[1]}"
    return f"{layouts}, so ranks would have to communicate to know its norm"


def replicated_value(t: Any) -> Tensor | None:
    """Return a number that a rank can read by itself; None of a DTensor that the ranks have not yet reduced."""
    if not is_dtensor(t):
        return t if isinstance(t, Tensor) else None
    return local_shard(t) if all(placement.is_replicate() for placement in t.placements) else None
