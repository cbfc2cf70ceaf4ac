"""The norm of gradients that all lie in pieces on one mesh, as under FSDP2: then one number per rank tells it.

Which way a call takes follows from the layout of its parameters, so all ranks take the same one.

Private torch: `DTensor._spec` and `DTensor._local_tensor`, which cost a tenth of the properties that return them.
Checked on torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _measure
from ._exchange import Exchange, read_mesh, ready
from ._fingerprint import combined, fingerprints

__all__ = ["pieces", "total"]


def pieces(parameters: Sequence[Any], grads: Sequence[Any]) -> tuple[list[Tensor], Any] | None:
    """This rank's piece of each gradient, and the mesh; None where they are laid out in any other way.

    A parameter without a gradient on this rank tells its layout itself.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or torch.compiler.is_compiling() or len(set(map(id, parameters))) != len(parameters):
        return None
    kind, mesh, placements = module.DTensor, None, None
    found: list[Tensor] = []
    for p, g in zip(parameters, grads, strict=True):
        t = p if g is None else g
        if not isinstance(t, kind):
            return None
        spec = t._spec
        if spec.placements != placements:
            placements = spec.placements
            if not all(place.is_shard() for place in placements):
                return None
        if spec.mesh is not mesh:
            if mesh is not None:
                return None
            mesh = spec.mesh
            if mesh.device_type != "cpu":  # a number would have to be waited for
                return None
        if g is not None:
            if p is not g and _elsewhere(p, mesh, kind):
                return None
            local = t._local_tensor
            found.append(local if type(local) is Tensor else ready(local))
    if mesh is None or len(set(map(id, found))) != len(found):
        return None
    return found, mesh


def _elsewhere(parameter: Any, mesh: Any, kind: Any) -> bool:
    return not isinstance(parameter, kind) or parameter._spec.mesh is not mesh


def total(
    parameters: Sequence[Tensor], found: list[Tensor], mesh: Any, p: float, foreach: bool | None, call: str
) -> Tensor:
    """The norm over all ranks, from what this one has of the gradients of these parameters."""
    _measure.check_foreach(found, foreach)
    value = _measure.total_norm(found, p, foreach)[1] if found else 0.0
    assert value is not None, "a norm on the CPU is known at once"
    exchange, what = Exchange(call), combined(fingerprints(None, parameters))
    for group in read_mesh(mesh).groups:
        value = exchange.share_total(value, len(parameters), p, group, what)
    exchange.finish()
    # Where this rank lacks a gradient, the parameter tells its dtype, so that all ranks return the same.
    return torch.tensor(
        value, dtype=_measure.result_dtype(found if len(found) == len(parameters) else parameters, value)
    )
