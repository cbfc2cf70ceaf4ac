"""Where parameters are: as the optimizer holds them, and as the recorded graph knows them.

They are the same, except under `fully_shard`, which spreads every parameter over ranks and lets the graph end in
whole copies that come and go.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .. import graph
from .._torch import fsdp
from .._torch.dtensor import is_dtensor
from ..errors import InplaceModifiedError, UnsupportedOperationError


@dataclass(frozen=True, eq=False)
class ParameterForms:
    """Parameters, by name.

    Attributes:
        held: what the optimizer holds and ``.grad`` is written to.
        leaves: what the graph ends in.
        mesh: what `fully_shard` has spread them over; None without it.
        gathered: a context in which the leaves have their values. Every rank has to enter it.
    """

    held: dict[str, Tensor]
    leaves: dict[str, Tensor]
    mesh: Any = None
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext


def parameter_forms(named: dict[str, Tensor]) -> ParameterForms:
    """Find where parameters are; refuse those that tensor parallelism has cut."""
    states = fsdp.sharded_states(named.values())
    forms_of = {id(tensor): forms for forms in fsdp.shards(states) for tensor in forms}
    forms = {name: forms_of.get(id(tensor), (tensor, tensor)) for name, tensor in named.items()}
    held = {name: found[0] for name, found in forms.items()}
    leaves = {name: found[1] for name, found in forms.items()}
    for name, leaf in leaves.items():
        if is_dtensor(leaf):
            raise _refusal(f"`{name}`", leaf)
    if not states:
        return ParameterForms(held, leaves)
    # Where only parameters that fully_shard ignores are asked about, the samples still lie on its mesh.
    spread = [tensor for tensor in held.values() if is_dtensor(tensor)] or [forms[0] for forms in fsdp.shards(states)]
    return ParameterForms(held, leaves, _common_mesh(spread), _opener(states))


def _common_mesh(spread: list[Any]) -> Any:
    meshes = [tensor.device_mesh for tensor in spread]
    if any(mesh != meshes[0] for mesh in meshes):
        raise UnsupportedOperationError(
            f"per_sample: the parameters lie on different meshes, {meshes[0]} among them, so it cannot be told which "
            "ranks hold the samples. Pass the parameters of one mesh at a time."
        )
    return meshes[0] if meshes else None


def refuse_unreadable(losses: Tensor) -> None:
    """Refuse graphs whose gradients are spread over ranks, and those that the engine may not run through."""
    if not dist.is_available() or not dist.is_initialized():
        return
    if is_dtensor(losses):
        raise UnsupportedOperationError(
            "per_sample: `losses` is a DTensor. Pass the losses of this rank's own samples as a plain tensor."
        )
    for node in graph.reachable([losses]):
        leaf = graph.leaf_tensor(node) if graph.is_leaf(node) else None
        if leaf is not None and is_dtensor(leaf):
            raise _refusal(f"a parameter of shape {tuple(leaf.shape)}", leaf)
        if fsdp.is_dtensor_op(node):
            raise _refusal(f"what goes into or comes out of `{graph.op(node)}`", None)
        if leaf is not None and fsdp.is_flattened(leaf):
            raise UnsupportedOperationError(
                "per_sample: the model is wrapped in FullyShardedDataParallel, which flattens its parameters into one. "
                "Use torch.distributed.fsdp.fully_shard, with which this works."
            )
        if fsdp.waits_for_first_backward(node):
            raise UnsupportedOperationError(
                "per_sample: DistributedDataParallel(static_graph=True) learns its graph from the first backward pass, "
                "which this is not. Leave out static_graph, or compute the losses with `model.module`."
            )


def distribute_like(parameter: Any, gradient: Tensor) -> Tensor:
    """Return the gradient as its parameter lies: this rank's part of it, if that is spread."""
    if not is_dtensor(parameter):
        return gradient
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _refusal(what: str, tensor: Any) -> UnsupportedOperationError:
    lies = "is a DTensor" if tensor is None else f"lies on {tensor.device_mesh} as {list(tensor.placements)}"
    return UnsupportedOperationError(
        f"per_sample: {what} {lies}. Under tensor parallelism no rank sees the whole gradient of a sample, so it is "
        "refused. Spread the model with fully_shard or DistributedDataParallel alone, or ask one process."
    )


def _opener(states: list[Any]) -> Callable[[], AbstractContextManager[None]]:
    depth, versions = 0, fsdp.versions(states)

    @contextmanager
    def gathered() -> Iterator[None]:
        nonlocal depth
        # torch's own check does not see it: what is gathered counts as unchanged.
        if fsdp.versions(states) != versions:
            raise InplaceModifiedError(
                "per_sample: parameters were changed since the losses were computed, so the recorded graph no longer "
                "fits them. Ask before optimizer.step().",
                (),
            )
        depth += 1
        try:
            with nullcontext() if depth > 1 else fsdp.gathered(states):
                yield
        finally:
            depth -= 1

    return gathered
