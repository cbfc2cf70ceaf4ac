"""The norm of gradients that are all sharded on one mesh of CPUs, as under FSDP2: one number per rank is enough.

Whether a call takes this path depends on the layout of its parameters only, so all ranks take the same one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _measure
from .._distributed.fingerprints import combine_fingerprints, parameter_fingerprints
from .._distributed.meshes import read_mesh
from .._torch.dtensor import dtensor_class, specs_of, stored_shards
from ..errors import BridleError
from ._norm_exchange import Entry, Kind, NormExchange


def shards_on_one_mesh(parameters: Sequence[Any], grads: Sequence[Any]) -> tuple[list[Tensor], Any] | None:
    """Return this rank's shard of each gradient, and the mesh; None where they are laid out in any other way.

    A parameter without a gradient on this rank stands for it with its own layout.
    """
    kind = dtensor_class()
    if kind is None or torch.compiler.is_compiling() or len(set(map(id, parameters))) != len(parameters):
        return None
    mesh: Any = None
    placements: Any = None
    present = [p if g is None else g for p, g in zip(parameters, grads, strict=True)]
    if not all(issubclass(t, kind) for t in {*map(type, present), *map(type, parameters)}):
        return None
    for spec, own in zip(specs_of(present), specs_of(parameters), strict=True):
        if spec.placements != placements:
            placements = spec.placements
            if not all(place.is_shard() for place in placements):
                return None
        if own.mesh is not mesh:
            if mesh is not None or own.mesh.device_type != "cpu":  # a number would have to be waited for
                return None
            mesh = own.mesh
        if spec.mesh is not mesh and spec.mesh != mesh:  # torch may give a gradient an equal mesh that was made before
            return None
    shards = stored_shards(g for g in grads if g is not None)
    if mesh is None or len(set(map(id, shards))) != len(shards):
        return None
    return shards, mesh


def total_norm(
    parameters: Sequence[Tensor], shards: list[Tensor], mesh: Any, p: float, foreach: bool | None, call: str
) -> Tensor:
    """Return the norm over all ranks, given this rank's shards of the gradients of these parameters."""
    exchange, error = NormExchange(call), None
    found: float | None = 0.0
    try:
        _measure.check_foreach(shards, foreach)
        found = _measure.total_norm(shards, p, foreach)[1] if shards else 0.0
    except BridleError as raised:  # the others wait for this rank
        error = raised
        exchange.fail(f"{type(raised).__name__}: {raised}")
    assert found is not None, "a norm on the CPU is known at once"
    dtypes = {t.dtype for t in (shards if len(shards) == len(parameters) else [*shards, *parameters])}
    kind = Kind(p, not dtypes.isdisjoint((torch.float64, torch.complex128)))
    norm, what = (
        torch.tensor([found], dtype=torch.float64),
        combine_fingerprints(parameter_fingerprints(None, parameters)),
    )
    for group in read_mesh(mesh).groups:
        exchange.reduce_norms(norm, [Entry(0, True)], [kind], group, parameters=what, count=len(parameters))
    if error is not None:
        raise error
    exchange.finish()
    value = norm.item()
    # Where this rank lacks a gradient, the parameter stands for its dtype, so that all ranks return the same.
    like = shards if len(shards) == len(parameters) else parameters
    return torch.tensor(value, dtype=_measure.result_dtype(like, value))
