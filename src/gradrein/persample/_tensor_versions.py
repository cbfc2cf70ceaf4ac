"""Whether what a DTensor stands on was changed in place: torch counts changes of the DTensor, not of its local tensor.

A plain tensor that becomes a DTensor shares its memory with it: the local tensor is a view. The local tensor of a view
of a DTensor counts for itself, but such a view knows the DTensor that it is one of. What ops on DTensors make has its
own memory, and torch refuses to change what `to_local` returns of it.
"""

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from .._torch.dtensor import is_dtensor, stored_shard
from .._torch.storage import changed_since_viewed
from ..errors import InplaceModifiedError


def refuse_changed(node: Node, name: str, value: Any) -> None:
    """Refuse a saved DTensor that was made of a plain tensor which was changed in place since.

    Raises:
        InplaceModifiedError: it was changed; or it may have been, where torch does not record when.
    """
    if not is_dtensor(value):
        return
    local = _counting(value)
    changed = changed_since_viewed(local) if local._is_view() else False
    if changed is False:
        return
    found = (
        f"per_sample: what `{graph.op(node)}` saved as `{name}`, a DTensor of shape {tuple(value.shape)}, shares its "
    )
    found += f"memory with a plain tensor that is at version {local._version}: it was changed in place"
    if changed:
        found += (
            " since the DTensor was made. Compute a new tensor there, x = x + y instead of x += y, or change a copy."
        )
    else:
        found += ", and of integers torch does not record whether that was before the DTensor was made. Pass a copy "
        found += "to the model: ids.clone()."
    raise InplaceModifiedError(found, (graph.op(node),))


def _counting(value: Any) -> Tensor:
    """Return the local tensor that counts changes: of a view, that of the DTensor which it is a view of."""
    return stored_shard(value._base if value._is_view() and value._base is not None else value)


def counting_shard(value: Any, moved: Any) -> Tensor:
    """Return this rank's shard of a redistributed DTensor, counting changes of the memory that both may lie in."""
    shard, root = stored_shard(moved), _counting(value)
    if root.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr():
        return shard
    return root.detach().as_strided(shard.shape, shard.stride(), shard.storage_offset())
