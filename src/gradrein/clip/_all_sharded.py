"""The norm of gradients that are all sharded on one mesh of CPUs, as under FSDP2: one number per rank is enough.

Whether a call takes this path depends on the layout of its parameters only, so all ranks take the same one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _measure
from .._distributed.fingerprints import combine_fingerprints, parameter_fingerprints
from .._distributed.meshes import groups_of_mesh
from .._distributed.recent import Recent
from .._torch.dtensor import specs_of, stored_shards
from .._torch.storage import repeats
from ..errors import GradreinError
from ._norm_exchange import Kind, NormExchange
from ._shard_layouts import one_mesh

_cut = Recent[bool]()


class OnOneMesh(NamedTuple):
    """Parameters with their specs, this rank's shards of those gradients that it has, and the mesh of all."""

    parameters: Sequence[Tensor]
    specs: Sequence[Any]
    shards: list[Tensor]
    mesh: Any


def read_one_mesh(parameters: Sequence[Any], grads: Sequence[Any]) -> OnOneMesh | None:
    """Return where gradients are that are all sharded on one mesh; None where they are laid out in any other way.

    A parameter without a gradient on this rank stands for it with its own layout.
    """
    if torch.compiler.is_compiling():
        return None
    own, specs = specs_of(parameters), specs_of(grads)
    present = grads
    if type(None) in set(map(type, specs)):
        present = [g for g in grads if g is not None]
        specs = [mine if g is None else spec for mine, g, spec in zip(own, grads, specs, strict=True)]
    mesh = one_mesh(own, specs)
    if mesh is None or mesh.device_type != "cpu" or not _are_cut(specs):  # else a number would have to be waited for
        return None
    return OnOneMesh(parameters, own, stored_shards(present), mesh)


def _are_cut(specs: Sequence[Any]) -> bool:
    """Return whether tensors are sharded over all dimensions of their mesh."""
    placements = [spec.placements for spec in specs]
    return _cut.of(placements, lambda: all(place.is_shard() for places in placements for place in places))


def total_norm(where: OnOneMesh, p: float, foreach: bool | None, call: str) -> tuple[Tensor, float, list[Tensor]]:
    """Return the norm over all ranks, as a tensor and as a number, and the shards to scale: each memory once."""
    exchange, error, found = NormExchange(call), None, 0.0
    parameters, specs, shards, mesh = where
    try:
        _measure.check_foreach(shards, foreach)
        found, double, may_share = _measure.total_on_cpu(shards, p, foreach)
        if may_share and (repeated := repeats(shards)):
            shards = [t for i, t in enumerate(shards) if i not in repeated]
            found, double, _ = _measure.total_on_cpu(shards, p, foreach)
    except GradreinError as raised:  # the others wait for this rank
        error, double = raised, _measure.any_double(shards)
        exchange.fail(f"{type(raised).__name__}: {raised}")
    # Where this rank lacks a gradient, the parameter stands for its dtype, so that all ranks return the same.
    like = double or (len(shards) < len(parameters) and _measure.any_double(parameters))
    norm = torch.tensor([found], dtype=torch.float64)
    what = combine_fingerprints(parameter_fingerprints(None, parameters, specs=specs))
    kinds = [Kind(p, like)]
    for group in groups_of_mesh(mesh):
        exchange.reduce_norms(norm, {0: True}, kinds, group, parameters=what, count=len(parameters))
    if error is not None:
        raise error
    exchange.finish()
    value = norm.item()
    return torch.tensor(value, dtype=_measure.dtype_of_norm(like, value)), value, shards
