"""torchtitan's `clip_grad_norm_`: one norm over FSDP, tensor, pipeline and expert parallelism, in float32 or wider.

import torchtitan.distributed.utils as dist_utils
from gradrein.integrations.torchtitan import clip_grad_norm_

dist_utils.clip_grad_norm_ = clip_grad_norm_  # before the trainer is built
"""

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import clip
from ..distributed import Disjoint


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
    ep_enabled: bool = False,  # noqa: ARG001  # experts are DTensors on their own mesh, which says it
) -> Tensor:
    """Clip by one norm, with the arguments that torchtitan's trainer passes. Return the norm before clipping.

    Args:
        parameters: One or several parameters.
        max_norm: The largest norm.
        norm_type: The order of the norm.
        error_if_nonfinite: Raise where the norm is NaN or infinite, before anything is changed.
        foreach: As in torch.
        pp_mesh: The mesh of pipeline stages, each with parameters of its own.
        ep_enabled: Not needed.
    """
    placement = None if pp_mesh is None else Disjoint(pp_mesh)
    return clip.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach, placement=placement)
