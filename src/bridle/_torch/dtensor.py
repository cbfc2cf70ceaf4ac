"""DTensors: tell them apart and read this rank's part, without importing `torch.distributed.tensor`.

Where that module is not in ``sys.modules``, no DTensor exists.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def any_dtensor(values: Iterable[Any]) -> bool:
    """Return whether a DTensor is among the values."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)


def wait_tensor(tensor: Any) -> Tensor:
    """Return a tensor whose collective has finished; torch hands out asynchronous ones."""
    pending = type(tensor) is not Tensor and hasattr(tensor, "wait")
    found: Tensor = tensor.wait() if pending else tensor
    return found


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's part: the local shard of a DTensor, any other tensor as it is."""
    return wait_tensor(tensor.to_local() if is_dtensor(tensor) else tensor)


def dtensor_class() -> type[Any] | None:
    """Return the class of DTensors, or None where none can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


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
    return [t if type(t) is Tensor else wait_tensor(t) for t in shards]


def spec_of(tensor: Any) -> Any:
    """Return mesh, placements and shape of a DTensor, for `spread`; None for another tensor."""
    return tensor._spec if is_dtensor(tensor) else None


def spread(shard: Tensor, spec: Any) -> Tensor:
    """Return the DTensor of which this is the shard here; the shard itself where there is no spec."""
    if spec is None:
        return shard
    from torch.distributed.tensor import DTensor

    found: Tensor = DTensor.from_local(
        shard, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return found
