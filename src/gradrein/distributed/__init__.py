"""Placement of plain tensors over ranks: `Disjoint`, `Replicated`. DTensors carry their own placement.

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

__all__ = ["Disjoint", "Placement", "PlacementSpec", "Replicated"]


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
    """Each rank of the group holds different parameters, or parts of them, under one norm.

    For pipeline stages, experts in plain tensors, columns or rows of tensor-parallel layers. A policy that decides for
    each parameter decides for what this rank holds; for the norm of a whole parameter in parts, use a DTensor.

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
        [`gradrein.distributed.Replicated`][], [`gradrein.clip_`][]
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
        [`gradrein.distributed.Disjoint`][], [`gradrein.clip_`][]
    """


Placement: TypeAlias = Disjoint | Replicated
"""How a plain tensor is distributed over ranks.

See Also:
    [`gradrein.distributed.PlacementSpec`][], [`gradrein.clip_`][]
"""

PlacementSpec: TypeAlias = Placement | Sequence[Placement] | Mapping[str, Placement | Sequence[Placement] | None]
"""One placement or several for all parameters, or a mapping from name patterns to them; None means no placement.

See Also:
    [`gradrein.distributed.Placement`][], [`gradrein.clip_`][]
"""
