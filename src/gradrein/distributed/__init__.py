"""Placement of plain tensors over ranks: `Disjoint`. DTensors carry their own placement.

```
gradrein.clip_(model, policy, placement={"experts.*": Disjoint(group), "*": None})
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ArgumentTypeError
from ._fingerprints import fingerprint as fingerprint
from ._fingerprints import parameters_fingerprint as parameters_fingerprint
from ._fingerprints import state_fingerprint as state_fingerprint
from ._groups import Group as Group
from ._groups import collective as collective
from ._groups import groups_of as groups_of
from ._groups import in_order as in_order
from ._reduction import Layout as Layout
from ._reduction import Reduction as Reduction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Disjoint", "PlacementSpec"]


@dataclass(frozen=True)
class Disjoint:
    """Each rank of the group holds different parameters, or parts of them, under one norm.

    For pipeline stages, experts in plain tensors, columns or rows of tensor-parallel layers. A policy that decides for
    each parameter decides for what this rank holds; for the norm of a whole parameter in parts, use a DTensor.

    Attributes:
        group: A process group, or a device mesh (all of its dimensions).

    Raises:
        ArgumentTypeError: (a TypeError) Neither of these.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradrein.clip_grad_norm_([weight], 1.0, placement=gradrein.distributed.Disjoint(dist.group.WORLD))
        tensor(5.)
        >>> dist.destroy_process_group()

    See Also:
        [`gradrein.distributed.PlacementSpec`][], [`gradrein.clip_`][]
    """

    group: ProcessGroup | DeviceMesh

    def __post_init__(self) -> None:
        """Validate the argument."""
        from torch.distributed import ProcessGroup
        from torch.distributed.device_mesh import DeviceMesh

        given: object = self.group
        if not isinstance(given, ProcessGroup | DeviceMesh):
            raise ArgumentTypeError(
                "Disjoint needs a process group or a device mesh, as in Disjoint(torch.distributed.group.WORLD) after "
                f"init_process_group; found {type(given).__name__}: {given!r:.80}."
            )


PlacementSpec: TypeAlias = Disjoint | Sequence[Disjoint] | Mapping[str, Disjoint | Sequence[Disjoint] | None]
"""One placement or several for all parameters, or a mapping from name patterns to them.

None means no placement: a plain tensor is then assumed to be the same on every rank.

See Also:
    [`gradrein.distributed.Disjoint`][], [`gradrein.clip_`][]
"""
