"""The ranks of a tensor-parallel mesh: they have the same samples, and each a shard of the model.

What a sample's gradient says as a whole is put together from the shards; what several ranks hold alike counts once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._distributed.agreement import Agreement
from .._distributed.collectives import all_gather_rows, all_reduce_
from .._distributed.meshes import Group
from .._torch.dtensor import crossing, dtensors_among, is_dtensor, sharded_dims, spec_of
from .._torch.process_group import assert_async
from ..errors import UnsupportedOperationError
from ._tensor_uses import shard_of
from .engine import Losses
from .representations.norms import Norms
from .representations.numerics import row_norms

_WHAT = "per-sample gradients"
_INSTEAD = "Spread the model with fully_shard or DistributedDataParallel alone, or ask one process."


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """The ranks that hold shards of one model.

    Attributes:
        groups: one process group for each dimension of the mesh; none where there is no tensor parallelism.
        device: where messages are.
        counted: the parameters whose shard counts here; others hold the same.
        dims: the numbers of these dimensions.
    """

    groups: tuple[Any, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    counted: frozenset[str] = frozenset()
    dims: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""
        return all(group.rank() == 0 for group in self.groups)

    def whole_norms(self, norms: Norms) -> Norms:
        """Put together norms of shards, in place: the same bits on all ranks."""
        if self.groups and norms.each:
            norms.each = self.lengths(norms.each)
            norms.total = row_norms(torch.stack(list(norms.each.values()), 1))
        return norms

    def lengths(self, each: Mapping[str, Tensor], error: Exception | None = None) -> dict[str, Tensor]:
        """Return lengths of whole vectors, given those of their parts here, in float64.

        Args:
            each: by name; where this rank has failed, anything of the same shapes.
            error: why this rank has failed: all of them raise a `RankError` that says so.
        """
        if not self.groups or not each:
            return dict(each)
        here = torch.stack([x if name in self.counted else torch.zeros_like(x) for name, x in each.items()])
        rows = torch.cat([here.new_full((1,), float(error is not None)), here.flatten()]).to(self.device)[None]
        for group in reversed(self.groups):
            rows = all_gather_rows(rows, group, _WHAT)
        self._refuse_failed(rows[:, 0], error)
        found = row_norms(rows[:, 1:].T).reshape(here.shape).to(here.device)
        return dict(zip(each, found, strict=True))

    def _refuse_failed(self, flags: Tensor, error: Exception | None) -> None:
        """Stop if a rank has raised a flag; all of them see it, and then ask why."""
        if flags.device.type != "cpu":  # reading would wait for the device
            assert_async((flags == 0).all(), "gradrein: a rank of the tensor-parallel mesh has stopped with an error")
        elif bool(flags.any()):
            agreement = Agreement(_WHAT, "norms")
            agreement.tell(self.messages(), error)
            agreement.finish()

    def messages(self) -> list[Group]:
        """Return the process groups with the device of their messages."""
        return [Group(group.group_name, group, self.device) for group in self.groups]

    def total(self, parts: Mapping[str, Tensor], nothing: Tensor) -> Tensor:
        """Return the sum over all parameters, given what their shards here contribute."""
        counted = [part for name, part in parts.items() if not self.groups or name in self.counted]
        found = torch.stack(counted).sum(0) if counted else nothing
        return self.sum(found) if self.groups else found

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        found = values.to(self.device, copy=True)
        for group in self.groups:
            all_reduce_(found, group, _WHAT)
        return found.to(values.device)

    def shard_of_first(self, whole: Tensor, leaf: Any) -> Tensor:
        """Return this rank's shard of what the first rank has, for a parameter; without other ranks, all of it."""
        if self.groups:
            whole = whole if self.is_first else torch.zeros_like(whole)
            real = torch.view_as_real(whole) if whole.is_complex() else whole
            found = self.sum(real)
            whole = torch.view_as_complex(found) if whole.is_complex() else found
        return shard_of(whole, leaf)


def tensor_ranks(leaves: Mapping[str, Any], losses: Losses, device: torch.device) -> TensorRanks:
    """Find the tensor-parallel mesh of the parameters and of the graph.

    Raises:
        UnsupportedOperationError: there are several meshes, or parameters that lie in an odd way.
    """
    crossings = [found for node in losses.scan.custom if (found := crossing(node)) is not None]
    spread = dtensors_among((*leaves.values(), *losses.scan.leaves.values()))
    meshes = [*(spec_of(leaf).mesh for leaf in spread), *(mesh for _, mesh, _ in crossings)]
    if not meshes:
        return TensorRanks()
    if any(mesh != meshes[0] for mesh in meshes):
        other = next(mesh for mesh in meshes if mesh != meshes[0])
        raise UnsupportedOperationError(
            f"per_sample: DTensors of the model are on {meshes[0]} and on {other}. Only one tensor-parallel mesh is "
            f"supported. {_INSTEAD}"
        )
    _refuse_odd_placements(leaves)
    return ranks_of_mesh(meshes[0], device, leaves)


def ranks_of_mesh(mesh: Any, device: torch.device, leaves: Mapping[str, Any] | None = None) -> TensorRanks:
    """Return the ranks of a tensor-parallel mesh, for parameters that lie on it."""
    groups = mesh.get_all_groups()
    first = [group.rank() == 0 for group in groups]
    copies = {name: _copied_along(leaf, len(groups)) for name, leaf in (leaves or {}).items()}
    counted = [name for name, along in copies.items() if all(first[i] for i in along)]
    dims = tuple(i for i, group in enumerate(groups) if group.size() > 1)
    return TensorRanks(tuple(groups[i] for i in dims), device, frozenset(counted), dims)


def _copied_along(leaf: Any, count: int) -> list[int]:
    """Return the dimensions of the mesh along which ranks hold the same."""
    dims = sharded_dims(spec_of(leaf).placements) if is_dtensor(leaf) else (None,) * count
    return [i for i, dim in enumerate(dims or ()) if dim is None]


def _refuse_odd_placements(leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        places = spec_of(leaf).placements if is_dtensor(leaf) else ()
        if sharded_dims(places) is None or any(place.is_partial() for place in places):
            raise UnsupportedOperationError(
                f"per_sample: `{name}` is on {spec_of(leaf).mesh} with placements {list(places)}. Along each "
                "dimension of a tensor-parallel mesh a parameter must be replicated or sharded in one dimension. "
                f"{_INSTEAD}"
            )
