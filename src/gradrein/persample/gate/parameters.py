"""Where parameters are: as the optimizer holds them, and as the recorded graph knows them.

They are the same, except under `fully_shard`, which shards every parameter over ranks and lets the graph end in
whole copies that come and go.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._torch import fsdp
from ...errors import InplaceModifiedError, UnsupportedOperationError


@dataclass(frozen=True, eq=False)
class ParameterViews:
    """Parameters, by name.

    Attributes:
        held: what the optimizer holds and ``.grad`` is written to.
        leaves: what the graph ends in.
        mesh: what `fully_shard` has sharded them over: the ranks that hold the samples; None without it.
        gathered: a context in which the leaves have their values. Every rank has to enter it.
    """

    held: dict[str, Tensor]
    leaves: dict[str, Tensor]
    mesh: Any = None
    gathered: Callable[[], AbstractContextManager[None]] = nullcontext


def parameter_views(named: dict[str, Tensor]) -> ParameterViews:
    """Find where parameters are."""
    states = fsdp.sharded_states(named.values())
    if not states:
        return ParameterViews(named, named)
    views_of = {id(tensor): views for views in fsdp.shards(states) for tensor in views}
    views = {name: views_of.get(id(tensor), (tensor, tensor)) for name, tensor in named.items()}
    held = {name: found[0] for name, found in views.items()}
    leaves = {name: found[1] for name, found in views.items()}
    meshes = fsdp.data_meshes(states)
    # Where only parameters that fully_shard ignores are asked about, the samples still lie on its mesh.
    used = [meshes[id(tensor)] for tensor in held.values() if id(tensor) in meshes] or list(meshes.values())
    return ParameterViews(held, leaves, _common_mesh(used), _opener(states))


def _common_mesh(meshes: list[Any]) -> Any:
    if any(mesh != meshes[0] for mesh in meshes):
        raise UnsupportedOperationError(
            f"per_sample: the parameters are on different meshes, {meshes[0]} among them, so it is unknown which "
            "ranks hold the samples. Pass the parameters of one mesh at a time."
        )
    return meshes[0] if meshes else None


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
