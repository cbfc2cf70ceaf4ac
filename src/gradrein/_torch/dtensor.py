"""DTensors: tell them apart and read this rank's part, without importing `torch.distributed.tensor`.

Where that module is not in ``sys.modules``, no DTensor exists.
"""

import inspect
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .modes import overrides_functions

_grad = attrgetter("grad")


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(value, kind)


def any_dtensor(values: Iterable[Any]) -> bool:
    """Return whether a DTensor is among the values."""
    return bool(dtensors_among(values))


def dtensors_among(values: Iterable[Any]) -> list[Any]:
    """Return the DTensors among the values."""
    kind = dtensor_class()
    return [] if kind is None else [value for value in values if isinstance(value, kind)]


def wait_tensor(tensor: Any) -> Tensor:
    """Return a tensor whose collective has finished; torch hands out asynchronous ones."""
    pending = type(tensor) is not Tensor and hasattr(tensor, "wait")
    ready: Tensor = tensor.wait() if pending else tensor
    return ready


def distribute_own(whole: Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Return a DTensor of a tensor that every rank has, each keeping its part of its own, without communication."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    everywhere = [Replicate()] * mesh.ndim
    return DTensor.from_local(whole, mesh, everywhere, run_check=False).redistribute(mesh, placements)


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's part: the local shard of a DTensor, any other tensor as it is."""
    return wait_tensor(tensor.to_local() if is_dtensor(tensor) else tensor)


def stored_shard(tensor: Any) -> Tensor:
    """Return this rank's part, which autograd does not record; any other tensor as it is."""
    return stored_shards([tensor])[0] if is_dtensor(tensor) else tensor


def is_crossing(node: Any) -> bool:
    """Return whether the op makes a DTensor of a plain tensor or the other way round, or redistributes one."""
    return _made_by(node) in ("_ToTorchTensor", "_FromTorchTensor", "Redistribute")


def _made_by(node: Any) -> str:
    made_by = getattr(type(node), "_forward_cls", None)
    known = made_by is not None and made_by.__module__.startswith("torch.distributed.tensor.")
    return made_by.__name__ if made_by is not None and known else ""


def dtensor_class() -> type[Any] | None:
    """Return the class of DTensors, or None where none can exist."""
    # Another thread may be importing the module, which is there before its class is.
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def grads_of(parameters: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradient of each parameter. With DTensors among them torch looks for overrides at each read: not here.

    Raises:
        AttributeError: One of them is not a tensor.
    """
    if dtensor_class() is None and not torch.compiler.is_compiling():
        return [*map(_grad, parameters)]
    if torch.compiler.is_compiling():
        return [p.grad for p in parameters]
    if any(map(overrides_functions, set(map(type, parameters)))):
        return [p.grad for p in parameters]
    with torch._C.DisableTorchFunctionSubclass():  # nothing that it could disable, but the search: half of the cost
        return [p.grad for p in parameters]


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """Return mesh, placements and tensor metadata of each DTensor, None for another tensor.

    This costs a tenth of the properties that return the parts.
    """
    try:
        return [t._spec for t in tensors]
    except AttributeError:
        return [getattr(t, "_spec", None) for t in tensors]


def stored_shards(dtensors: Iterable[Any]) -> list[Tensor]:
    """Return this rank's shard of each DTensor, at a tenth of the cost of `to_local`, which autograd records."""
    shards = [t._local_tensor for t in dtensors]
    return shards if set(map(type, shards)) <= {Tensor} else [wait_tensor(t) for t in shards]


def stored_parts(tensors: Sequence[Any], specs: Sequence[Any]) -> list[Tensor]:
    """Return this rank's shard of each DTensor, which has a spec, and every other tensor as it is."""
    if type(None) not in set(map(type, specs)):
        return stored_shards(tensors)
    return [t if spec is None else stored_shard(t) for t, spec in zip(tensors, specs, strict=True)]


def spread(shard: Tensor, spec: Any) -> Tensor:
    """Return the DTensor of which this is the shard here; the shard itself where there is no spec."""
    if spec is None:
        return shard
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        shard, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return whole
