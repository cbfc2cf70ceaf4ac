"""Whether what a DTensor stands on was changed in place: torch counts changes of the DTensor, not of its local tensor.

A plain tensor that becomes a DTensor shares its memory with it, and so does what `to_local` returns. The local tensor
of a view counts for itself, but a view knows the DTensor that it is one of.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import graph
from .._torch.dtensor import is_dtensor, stored_shard
from ..errors import InplaceModifiedError


def refuse_changed(node: Node, name: str, value: Any) -> None:
    """Refuse a saved DTensor whose local tensor was changed in place, other than by an op on the DTensor.

    Raises:
        InplaceModifiedError: it was changed, or may have been.
    """
    if not is_dtensor(value) or isinstance(_viewed(value), nn.Parameter):
        return
    local = stored_shard(_viewed(value))
    if local.is_inference() or local._version == 0:
        return
    where = f"what `{graph.op(node)}` saved as `{name}`, a DTensor of shape {tuple(value.shape)},"
    found = f"shares its memory with a plain tensor that is at version {local._version}"
    base = local._base if local._is_view() else None
    if base is None or not base.requires_grad:
        raise InplaceModifiedError(
            f"per_sample: {where} {found}: it was changed in place, and torch does not record whether that was after "
            "the forward pass. Compute a new tensor there. If it is an input that was filled in place before the "
            "forward pass, pass a copy of it to the model: x.clone().",
            (graph.op(node),),
        )
    if _changed_since(local):
        raise InplaceModifiedError(
            f"per_sample: {where} {found}: it was changed in place since. Compute a new tensor there, x = x + y "
            "instead of x += y, or change a copy.",
            (graph.op(node),),
        )


def _viewed(value: Any) -> Any:
    """Return the DTensor that one is a view of, whose local tensor counts changes; itself if it is none."""
    return value._base if value._is_view() and value._base is not None else value


def _changed_since(local: Tensor) -> bool:
    """Return whether an activation was changed after a DTensor was made of it; before, as by relu_, it may have been.

    The local tensor is a view of it that torch has not made part of the graph. torch does so when it is asked for the
    local tensor's history, if the activation has changed, or says that it cannot.
    """
    try:
        return local.grad_fn is not None
    except RuntimeError:
        return True


def counting_shard(value: Any, moved: Any) -> Tensor:
    """Return this rank's shard of a redistributed DTensor, counting changes of the memory that both may lie in."""
    shard, root = stored_shard(moved), stored_shard(_viewed(value))
    if root.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr():
        return shard
    return root.detach().as_strided(shard.shape, shard.stride(), shard.storage_offset())
