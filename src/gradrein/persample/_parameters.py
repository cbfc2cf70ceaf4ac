"""Where parameters are: as the optimizer holds them, and as the recorded graph knows them.

They are the same, except under `fully_shard`, which spreads every parameter over ranks and lets the graph end in
whole copies that come and go.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .. import graph
from .._torch import fsdp
from .._torch.dtensor import is_dtensor
from .._torch.process_group import is_scheduled
from ..errors import InplaceModifiedError, UnsupportedOperationError


@dataclass(frozen=True, eq=False)
class ParameterForms:
    """Parameters, by name.

    Attributes:
        held: what the optimizer holds and ``.grad`` is written to.
        leaves: what the graph ends in.
        mesh: what `fully_shard` has spread them over: the ranks that hold the samples; None without it.
        gathered: a context in which the leaves have their values. Every rank has to enter it.
    """

    held: dict[str, Tensor]
    leaves: dict[str, Tensor]
    mesh: Any = None
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext


def parameter_forms(named: dict[str, Tensor]) -> ParameterForms:
    """Find where parameters are."""
    states = fsdp.sharded_states(named.values())
    forms_of = {id(tensor): forms for forms in fsdp.shards(states) for tensor in forms}
    forms = {name: forms_of.get(id(tensor), (tensor, tensor)) for name, tensor in named.items()}
    held = {name: found[0] for name, found in forms.items()}
    leaves = {name: found[1] for name, found in forms.items()}
    if not states:
        return ParameterForms(held, leaves)
    meshes = fsdp.data_meshes(states)
    # Where only parameters that fully_shard ignores are asked about, the samples still lie on its mesh.
    spread = [meshes[id(tensor)] for tensor in held.values() if id(tensor) in meshes] or list(meshes.values())
    return ParameterForms(held, leaves, _common_mesh(spread), _opener(states))


def _common_mesh(meshes: list[Any]) -> Any:
    if any(mesh != meshes[0] for mesh in meshes):
        raise UnsupportedOperationError(
            f"per_sample: the parameters are on different meshes, {meshes[0]} among them, so it is unknown which "
            "ranks hold the samples. Pass the parameters of one mesh at a time."
        )
    return meshes[0] if meshes else None


def refuse_unreadable(losses: Tensor) -> None:
    """Refuse losses that are spread over ranks, and graphs that the engine may not run through."""
    if not dist.is_available() or not dist.is_initialized():
        return
    if is_dtensor(losses):
        raise UnsupportedOperationError(
            "per_sample: `losses` is a DTensor. Pass the losses of this rank's own samples as a plain tensor: under "
            "tensor parallelism, losses.full_tensor()."
        )
    for node in graph.walk([losses]):
        leaf = graph.leaf_tensor(node) if graph.is_leaf(node) else None
        if leaf is not None and fsdp.is_flattened(leaf):
            raise UnsupportedOperationError(
                "per_sample: the model is wrapped in FullyShardedDataParallel, which flattens its parameters into one. "
                "Use torch.distributed.fsdp.fully_shard instead, which works."
            )
        if leaf is not None and not isinstance(leaf, nn.Parameter) and is_scheduled():
            raise UnsupportedOperationError(
                "per_sample: the losses are those of the last stage of a pipeline schedule, and are computed from an "
                f"activation of shape {tuple(leaf.shape)} that another stage has sent. The other stages hold the rest "
                "of each sample's gradient, and the schedule sends them sums over the micro-batch only. Distribute "
                "the model with fully_shard or parallelize_module instead."
            )
        if fsdp.waits_for_first_backward(node):
            raise UnsupportedOperationError(
                "per_sample: DistributedDataParallel(static_graph=True) records its graph in the first backward "
                "pass, and per_sample is not one. Leave out static_graph, or compute the losses with `model.module`."
            )


def _opener(states: list[Any]) -> Callable[[], AbstractContextManager[None]]:
    depth, versions = 0, fsdp.versions(states)

    @contextmanager
    def gathered() -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            with nullcontext() if depth > 1 else fsdp.gathered(states):
                # torch's own check does not see it: what is gathered counts as unchanged.
                if fsdp.versions(states) != versions:  # only now: the other ranks gather too
                    raise InplaceModifiedError(
                        "per_sample: parameters were changed since the losses were computed, so the recorded graph "
                        "no longer matches them. Query before optimizer.step().",
                        (),
                    )
                yield
        finally:
            depth -= 1

    return gathered
