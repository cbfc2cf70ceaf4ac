"""What tensors cannot say themselves about ranks, in three words: `Stages`, `Sharded`, `Replicated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Groups", "Mark", "Replicated", "Sharded", "Stages", "marks_of"]


@dataclass(frozen=True)
class Stages:
    """The ranks of the group hold different parameters, under one norm: pipeline stages, experts in plain tensors.

    Attributes:
        group: a process group, or a device mesh (all of its dimensions).

    Example:
        >>> import torch.distributed as dist
        >>> alone = torch.distributed.HashStore()
        >>> dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> bridle.clip_grad_norm_([weight], 1.0, groups=bridle.Stages(dist.group.WORLD))
        tensor(5.)
        >>> dist.destroy_process_group()
    """

    group: ProcessGroup | DeviceMesh


@dataclass(frozen=True)
class Sharded:
    """Every rank of the group holds a piece of each of these parameters, as a plain tensor.

    All ranks list the same parameters in the same order; a rank may lack the gradient of some.

    Attributes:
        group: a process group, or a device mesh (all of its dimensions).

    Example:
        >>> import torch.distributed as dist
        >>> alone = torch.distributed.HashStore()
        >>> dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        >>> columns = torch.nn.Parameter(torch.zeros(2))
        >>> columns.grad = torch.tensor([3.0, 4.0])
        >>> report = bridle.clip_({"up": columns}, bridle.by_parameter(1.0), groups=bridle.Sharded(dist.group.WORLD))
        >>> report.norms
        {'up': 5.0}
        >>> dist.destroy_process_group()
    """

    group: ProcessGroup | DeviceMesh


@dataclass(frozen=True)
class Replicated:
    """The ranks of the group that hold these parameters hold the same ones, and they count once.

    Copies that every rank holds need no mark: a plain tensor is taken to be one. This is for those that only some
    ranks of a `Stages` group hold, such as an embedding shared by the first and the last stage.

    Attributes:
        group: a process group, or a device mesh (all of its dimensions).

    Example:
        >>> import torch.distributed as dist
        >>> alone = torch.distributed.HashStore()
        >>> dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        >>> stages = dist.group.WORLD
        >>> tied, own = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        >>> tied.grad, own.grad = torch.tensor([3.0]), torch.tensor([4.0])
        >>> marks = {"tied": bridle.Replicated(stages), "*": bridle.Stages(stages)}
        >>> bridle.clip_({"tied": tied, "own": own}, bridle.by_norm(1.0), groups=marks).norm
        5.0
        >>> dist.destroy_process_group()
    """

    group: ProcessGroup | DeviceMesh


Mark: TypeAlias = Stages | Sharded | Replicated

Groups: TypeAlias = Mark | Sequence[Mark] | Mapping[str, Mark | Sequence[Mark] | None]
"""One mark or several for all parameters, or a mapping from name patterns to them; None says nothing."""


def marks_of(groups: Groups | None, names: list[str] | None, n: int) -> tuple[list[tuple[Mark, ...]], list[int]]:
    """The marks of each pattern, and for each of n parameters the number of the first pattern that matches its name.

    Unlike a pattern for policies, one may match nothing here: another rank may hold what it is for.
    """
    if not isinstance(groups, Mapping):
        return [_marks(groups)], [0] * n
    if names is None:
        raise ArgumentError(
            "name patterns in `groups` need names, and what was passed has none. Pass the module, "
            "`model.named_parameters()`, a dict, or an optimizer that was built from `named_parameters()`."
        )
    patterns = list(groups)
    pattern_of = [next((k for k, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), -1) for name in names]
    if -1 in pattern_of:
        raise ArgumentError(
            f"no pattern of `groups` matches the parameter {names[pattern_of.index(-1)]!r}. Add one "
            '("*" matches all; None says nothing about them).'
        )
    return [_marks(groups[pattern]) for pattern in patterns], pattern_of


def _marks(found: Any) -> tuple[Mark, ...]:
    marks = () if found is None else (found,) if isinstance(found, Mark) else tuple(found) if _is_list(found) else None
    if marks is None or not all(isinstance(mark, Mark) for mark in marks):
        raise ArgumentError(
            f"`groups` says Stages(group), Sharded(group) or Replicated(group), several of them, or a mapping from "
            f"name patterns to those; found {type(found).__name__}: {found!r:.80}."
        )
    return marks


def _is_list(found: Any) -> bool:
    return isinstance(found, (list, tuple))
