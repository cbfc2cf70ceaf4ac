"""Placement of plain tensors over ranks: `Sharded`, `Replicated`, `Disjoint`. DTensors carry their own placement.

```
gradrein.clip_(model, policy, placement={"embed.*": Replicated(stages), "*": Disjoint(stages)})
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..errors import ArgumentTypeError
from ._agreement import Agreement as Agreement
from ._collectives import collective as collective
from ._fingerprints import checksum as checksum
from ._fingerprints import fingerprint as fingerprint
from ._fingerprints import parameters_fingerprint as parameters_fingerprint
from ._fingerprints import state_fingerprint as state_fingerprint
from ._meshes import Group as Group
from ._meshes import groups_of as groups_of
from ._meshes import in_order as in_order
from ._reduction import Layout as Layout
from ._reduction import Reduction as Reduction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Disjoint", "Placement", "PlacementSpec", "Replicated", "Sharded"]


@dataclass(frozen=True)
class _OverGroup:
    group: ProcessGroup | DeviceMesh

    def __post_init__(self) -> None:
        from torch.distributed import ProcessGroup
        from torch.distributed.device_mesh import DeviceMesh

        given: object = self.group
        if not isinstance(given, ProcessGroup | DeviceMesh):
            name = type(self).__name__
            raise ArgumentTypeError(
                f"{name} needs a process group or a device mesh, as in {name}(torch.distributed.group.WORLD) after "
                f"init_process_group; found {type(given).__name__}: {given!r:.80}."
            )


@dataclass(frozen=True)
class Disjoint(_OverGroup):
    """Each rank of the group holds different parameters, under one norm: pipeline stages, experts in plain tensors.

    Attributes:
        group: A process group, or a device mesh (all of its dimensions).

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradrein.clip_grad_norm_([weight], 1.0, placement=gradrein.distributed.Disjoint(dist.group.WORLD))
        tensor(5.)
        >>> dist.destroy_process_group()

    See Also:
        [`gradrein.distributed.Sharded`][], [`gradrein.distributed.Replicated`][], [`gradrein.clip_`][]
    """


@dataclass(frozen=True)
class Sharded(_OverGroup):
    """Every rank of the group holds a shard of each of these parameters, as a plain tensor.

    All ranks list the same parameters in the same order, with gradients for the same ones.

    Attributes:
        group: A process group, or a device mesh (all of its dimensions).

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> columns = torch.nn.Parameter(torch.zeros(2))
        >>> columns.grad = torch.tensor([3.0, 4.0])
        >>> sharded = gradrein.distributed.Sharded(dist.group.WORLD)
        >>> gradrein.clip_({"up": columns}, gradrein.by_norm(1.0, per_parameter=True), placement=sharded).norms
        {'up': 5.0}
        >>> dist.destroy_process_group()

    See Also:
        [`gradrein.distributed.Disjoint`][], [`gradrein.distributed.Replicated`][], [`gradrein.clip_`][]
    """


@dataclass(frozen=True)
class Replicated(_OverGroup):
    """The ranks of the group that hold these parameters hold identical copies, which count once.

    Copies that every rank holds need no placement: a plain tensor is assumed to be one. Use this for copies that only
    some ranks of a `Disjoint` group hold, such as an embedding shared by the first and the last pipeline stage.

    Attributes:
        group: A process group, or a device mesh (all of its dimensions).

    Examples:
        >>> import torch.distributed as dist
        >>> from gradrein.distributed import Disjoint, Replicated
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> stages = dist.group.WORLD
        >>> tied, own = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        >>> tied.grad, own.grad = torch.tensor([3.0]), torch.tensor([4.0])
        >>> placement = {"tied": Replicated(stages), "*": Disjoint(stages)}
        >>> gradrein.clip_({"tied": tied, "own": own}, gradrein.by_norm(1.0), placement=placement).norm
        5.0
        >>> dist.destroy_process_group()

    See Also:
        [`gradrein.distributed.Sharded`][], [`gradrein.distributed.Disjoint`][], [`gradrein.clip_`][]
    """


Placement: TypeAlias = Disjoint | Sharded | Replicated
"""How a plain tensor is distributed over ranks.

See Also:
    [`gradrein.distributed.PlacementSpec`][], [`gradrein.clip_`][]
"""

PlacementSpec: TypeAlias = Placement | Sequence[Placement] | Mapping[str, Placement | Sequence[Placement] | None]
"""One placement or several for all parameters, or a mapping from name patterns to them; None means no placement.

See Also:
    [`gradrein.distributed.Placement`][], [`gradrein.clip_`][]
"""
