"""The ranks of a tensor-parallel mesh: they have the same samples, and each a shard of the model.

What a sample's gradient says as a whole is put together from the shards; what several ranks hold alike counts once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from .._distributed.agreement import Agreement
from .._distributed.collectives import all_gather_rows, all_reduce_
from .._distributed.fingerprints import fingerprint
from .._distributed.meshes import Group
from .._torch.dtensor import crossing, grad_placements, is_dtensor, sharded_dims, spec_of
from .._torch.nodes import output_shapes
from ..errors import RankError, UnsupportedOperationError
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
    """

    groups: tuple[Any, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    counted: frozenset[str] = frozenset()

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

    def lengths(self, each: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return lengths of whole vectors, given those of their parts here, in float64."""
        if not self.groups or not each:
            return dict(each)
        here = torch.stack([x if name in self.counted else torch.zeros_like(x) for name, x in each.items()])
        rows = here.to(self.device)[None]
        for group in reversed(self.groups):
            rows = all_gather_rows(rows, group, _WHAT)
        found = row_norms(rows.movedim(0, -1).reshape(-1, len(rows))).reshape(here.shape).to(here.device)
        return dict(zip(each, found, strict=True))

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

    def agree(self, losses: Losses) -> None:
        """Compare what each rank has recorded, and its losses.

        Raises:
            RankError: they are not those of the same samples and the same model.
        """
        if not self.groups:
            return
        shapes = output_shapes(losses.scan.nodes)
        recorded = fingerprint([(graph.op(node), outs) for node, outs in shapes.items()])
        values = losses.root.detach().double().cpu()
        finite = values.isfinite()
        values = values.where(finite, 0)
        sent = torch.cat([values, -values, finite.double(), -finite.double()])
        agreement = Agreement(_WHAT, "per_sample")
        asked = {"the number of samples": losses.samples}
        compared = {"the recorded graph": recorded, "`sample_groups`": fingerprint(losses.sample_of.tolist())}
        for group in self.groups:
            there = Group(group.group_name, group, self.device)
            sent = agreement.all_reduce(sent, there, asked, compared, largest=True)
        agreement.finish()
        most, least, finite, not_finite = sent.chunk(4)
        eps = torch.finfo(losses.root.dtype).eps ** 0.5
        size = torch.cat([most.abs(), least.abs()]).max() if len(most) else 0.0
        differ = (most + least > eps * size) | (finite + not_finite != 0)
        if bool(differ.any()):
            raise RankError(
                f"per_sample: the loss of sample {int(differ.nonzero()[0])} is not the same on all ranks of the "
                "tensor-parallel mesh. They have to be given the same samples, and losses made from whole outputs: "
                "pass output_layouts=Replicate() to the last layer, or call full_tensor(). No gradient was changed."
            )


def tensor_ranks(leaves: Mapping[str, Any], losses: Losses, device: torch.device) -> TensorRanks:
    """Find the tensor-parallel mesh of the parameters and of the graph, and refuse graphs that are no one model's.

    Raises:
        UnsupportedOperationError: there are several meshes, or plain parameters are used with shards.
    """
    crossings = [found for node in losses.scan.custom if (found := crossing(node)) is not None]
    spread = [leaf for leaf in (*leaves.values(), *losses.scan.leaves.values()) if is_dtensor(leaf)]
    meshes = [*(spec_of(leaf).mesh for leaf in spread), *(mesh for _, mesh, _ in crossings)]
    if not meshes:
        return TensorRanks()
    if any(mesh != meshes[0] for mesh in meshes):
        other = next(mesh for mesh in meshes if mesh != meshes[0])
        raise UnsupportedOperationError(
            f"per_sample: DTensors of the model lie on {meshes[0]} and on {other}. It is known for one tensor-parallel "
            f"mesh only which of them hold the same. {_INSTEAD}"
        )
    _refuse_odd_placements(leaves)
    _refuse_shards_in_plain_tensors(leaves, losses)
    mesh = meshes[0]
    groups = mesh.get_all_groups()
    first = [group.rank() == 0 for group in groups]
    copies = {name: _copied_along(leaf, len(groups)) for name, leaf in leaves.items()}
    counted = [name for name, along in copies.items() if all(first[i] for i in along)]
    return TensorRanks(tuple(group for group in groups if group.size() > 1), device, frozenset(counted))


def _copied_along(leaf: Any, count: int) -> list[int]:
    """Return the dimensions of the mesh along which ranks hold the same."""
    dims = sharded_dims(spec_of(leaf).placements) if is_dtensor(leaf) else (None,) * count
    return [i for i, dim in enumerate(dims or ()) if dim is None]


def _refuse_odd_placements(leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        places = spec_of(leaf).placements if is_dtensor(leaf) else ()
        if sharded_dims(places) is None or any(place.is_partial() for place in places):
            raise UnsupportedOperationError(
                f"per_sample: `{name}` lies on {spec_of(leaf).mesh} as {list(places)}. A parameter can be sharded in "
                f"one dimension or replicated along each dimension of a tensor-parallel mesh. {_INSTEAD}"
            )


def _refuse_shards_in_plain_tensors(leaves: Mapping[str, Tensor], losses: Losses) -> None:
    """Refuse plain parameters that meet shards, and shards that are used as if they were whole.

    The gradient of such a parameter is another one on each rank, and none is that of the model.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    for node in losses.scan.custom:
        found = crossing(node)
        if found is None or all(place.is_replicate() for place in found[2]):
            continue
        if found[0] == "from":
            for below in _down(node):
                if graph.is_leaf(below) and id(graph.leaf_tensor(below)) in names:
                    raise _plain(names[id(graph.leaf_tensor(below))], found[2])
                _refuse_cutting(below, found[2])
        else:
            _refuse_whole_use(node, losses, found[2])


def _refuse_cutting(node: Node, places: Iterable[Any]) -> None:
    """Refuse a whole activation that plain ops use with shards: each rank has a part of its gradient only."""
    found = crossing(node)
    if found is None or any(place.is_partial() for place in grad_placements(node)):
        return
    if any(made.is_shard() and was.is_replicate() for made, was in zip(places, found[2], strict=True)):
        raise UnsupportedOperationError(
            f"per_sample: a tensor that lies as {list(found[2])} is made plain, and used for one that lies as "
            f"{list(places)}: each rank has a part of its gradient only, which to_local() takes for all of it. Pass "
            "to_local(grad_placements=[Partial()]), or redistribute the DTensor instead of cutting it by hand."
        )


def _refuse_whole_use(node: Node, losses: Losses, places: Iterable[Any]) -> None:
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        uses = losses.read.consumers[top]
        for use in uses:
            found = crossing(use.node)
            if found is not None and all(place.is_replicate() for place in found[2]):
                raise _whole(places, "a whole tensor, by DTensor.from_local with Replicate()")
            if found is None and use.node not in seen:
                seen.add(use.node)
                stack.append(use.node)
        if top is losses.root.grad_fn:
            raise _whole(places, "the losses, without a reduction over ranks")


def _down(node: Node) -> Iterable[Node]:
    """Yield the plain ops and leaves below a node, down to where DTensors were made plain."""
    stack, seen = [node], {node}
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                yield below
                if crossing(below) is None:
                    stack.append(below)


def _plain(name: str, places: Iterable[Any]) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: `{name}` is a plain tensor, and is used on parts of activations that lie as {list(places)}, so "
        "its gradient is another one on each rank. Make it a DTensor as well: list its module in the plan of "
        "parallelize_module, with SequenceParallel() for a norm layer.",
        "",
        name,
    )


def _whole(places: Iterable[Any], what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: a part of an activation that lies as {list(places)} is made into {what}. The ranks then compute "
        "different things, and which gradient is meant cannot be told. Redistribute it first: "
        "redistribute(placements=[Replicate()]), output_layouts=Replicate() or full_tensor()."
    )
