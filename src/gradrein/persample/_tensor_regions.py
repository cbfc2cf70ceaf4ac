"""Plain tensors between DTensors: along each dimension of the mesh the same on all ranks, or another part on each.

An op that is given a part makes parts. What is the same on all ranks has a gradient that is the same, so it must not
meet parts: each rank would have a part of its gradient, and nothing adds them up. `parallelize_module` keeps to this;
models that are written by hand on local tensors may not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from .._torch.dtensor import any_dtensor, crossing, grad_placements, is_dtensor, is_taken_apart
from ..errors import UnsupportedOperationError
from .engine import Losses

_REDISTRIBUTE = (
    "Redistribute the DTensor instead: redistribute(placements=[...]); or, where all ranks use all of it with parts of "
    "others, pass to_local(grad_placements=[Partial()])."
)


@dataclass(frozen=True, eq=False)
class Regions:
    """What the outputs of each op are.

    Attributes:
        spread: the ops whose outputs are DTensors.
        varies: for each other op, the dimensions of the mesh along which ranks have different parts.
        summed: where a whole tensor is made plain whose gradient is the sum over ranks: each may use another part.
    """

    spread: set[Node] = field(default_factory=set)
    varies: dict[Node, frozenset[int]] = field(default_factory=dict)
    summed: list[Node] = field(default_factory=list)


def read_regions(leaves: Mapping[str, Tensor], losses: Losses) -> Regions:
    """Tell the regions of a graph apart, and refuse those whose gradients are no one model's.

    Raises:
        UnsupportedOperationError: parts are used as if they were whole, or what is whole in parts.
    """
    crossings = {node: found for node in losses.scan.custom if (found := crossing(node)) is not None}
    regions = Regions()
    if not crossings and not any_dtensor((*leaves.values(), *losses.scan.leaves.values())):
        return regions  # a DTensor comes from a leaf or from a crossing: there is none, and nothing to tell apart
    names = {id(leaf): name for name, leaf in leaves.items()}
    for node in reversed(losses.read.nodes):
        _add(regions, node, crossings.get(node), names)
    root = losses.root.grad_fn
    if root is not None and regions.varies.get(root):
        raise _whole(_origin(root), "the losses, without a reduction over ranks")
    return regions


def _add(regions: Regions, node: Node, found: tuple[str, Any, tuple[Any, ...]] | None, names: dict[int, str]) -> None:
    below = [used for used, _ in node.next_functions if used is not None]
    if found is None:
        if any(used in regions.spread for used in below) or (
            graph.is_leaf(node) and is_dtensor(graph.leaf_tensor(node))
        ):
            regions.spread.add(node)
            return
        regions.varies[node] = frozenset().union(*(regions.varies[used] for used in below))
        _refuse_cutting(regions, node, below, regions.varies[node], names)
        return
    way, _, places = found
    if way == "to":
        regions.varies[node] = _taken_out(node, places)
        if any(places[dim].is_replicate() for dim in regions.varies[node]):
            regions.summed.append(node)
        return
    regions.spread.add(node)
    (used,) = below
    if used in regions.spread:
        return  # of a DTensor, which torch refuses when it is run
    _refuse_taken_apart(used)
    _refuse_grad_placements(node, places)
    whole = {i for i, place in enumerate(places) if place.is_replicate()}
    if whole & regions.varies[used]:
        raise _whole(_origin(used), "a whole tensor, by DTensor.from_local with Replicate()")
    _refuse_cutting(regions, node, below, frozenset(range(len(places))) - whole, names)


def _taken_out(node: Node, places: tuple[Any, ...]) -> frozenset[int]:
    """Return the dimensions along which `to_local` gives each rank another part."""
    if any(place.is_partial() for place in places):
        raise UnsupportedOperationError(
            f"per_sample: partial sums, a tensor with placements {list(places)}, are converted to plain tensors by "
            "to_local(). Operations on them act on no value of the model. Redistribute them first: "
            "redistribute(placements=[Replicate()]) or full_tensor()."
        )
    given = grad_placements(node) or places
    summed = {i for i, (place, g) in enumerate(zip(places, given, strict=True)) if place.is_replicate() and _is_sum(g)}
    if any(place != g and i not in summed for i, (place, g) in enumerate(zip(places, given, strict=True))):
        raise UnsupportedOperationError(
            f"per_sample: a tensor with placements {list(places)} is converted by "
            f"to_local(grad_placements={list(given)}), but its gradient cannot have these placements. Leave "
            "`grad_placements` out; Partial() is for a whole tensor of which each rank uses a part, or which it uses "
            "with a part of another."
        )
    return frozenset({i for i, place in enumerate(places) if not place.is_replicate()} | summed)


def _is_sum(place: Any) -> bool:
    return bool(place.is_partial()) and place.reduce_op == "sum"


def _refuse_taken_apart(node: Node) -> None:
    if graph.is_leaf(node) and is_taken_apart(graph.leaf_tensor(node)):
        raise UnsupportedOperationError(
            "per_sample: DistributedDataParallel(device_mesh=...) has replaced the DTensors of a tensor-parallel "
            "model, so that model.parameters() no longer lists them. Use fully_shard over that dimension of the "
            "mesh instead; or leave the model as it is, and pass process_group=mesh[...] to per_sample, which sums "
            "over the ranks."
        )


def _refuse_grad_placements(node: Node, places: tuple[Any, ...]) -> None:
    given = grad_placements(node)
    usual = [g.is_replicate() if place.is_partial() else g == place for place, g in zip(places, given, strict=False)]
    if not all(usual) or any(place.is_partial() and not _is_sum(place) for place in places):
        said = f", grad_placements={list(given)}" if given else ""
        raise UnsupportedOperationError(
            f"per_sample: DTensor.from_local is called with placements={list(places)}{said}, so that the gradient "
            "torch returns is not that of the local tensor on each rank. Leave `grad_placements` out, and use "
            "Replicate(), Shard() or Partial() with a sum."
        )


def _refuse_cutting(
    regions: Regions, node: Node, below: Iterable[Node], parts: frozenset[int], names: Mapping[int, str]
) -> None:
    """Refuse an op that makes parts of what is whole: each rank has a part of the gradient of the whole only."""
    for used in below:
        if not parts - regions.varies[used]:
            continue
        for source in _down(used):
            if graph.is_leaf(source) and id(graph.leaf_tensor(source)) in names:
                raise _plain(names[id(graph.leaf_tensor(source))], _origin(node))
            found = crossing(source)
            if found is not None:
                raise _cut(found[2], node)


def _origin(node: Node) -> str:
    """Say what a plain tensor is a part of, or is made a part of."""
    for source in _down(node):
        found, given = crossing(source), grad_placements(source)
        if found is not None and not all(place.is_replicate() for place in found[2]):
            return f"with placements {list(found[2])}"
        if any(place.is_partial() for place in given):
            return f"taken out by to_local(grad_placements={list(given)})"
    return "on each rank"


def _down(node: Node) -> Iterable[Node]:
    """Yield a node and the plain ops and leaves below it, down to where DTensors were made plain."""
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        yield top
        if crossing(top) is not None:
            continue
        for below, _ in top.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)


def _plain(name: str, origin: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: `{name}` is a plain tensor, and is used on a part of an activation {origin}, so its gradient "
        "differs between ranks. Make it a DTensor as well: list its module in the plan of "
        "parallelize_module, with SequenceParallel() for a norm layer.",
        "",
        name,
    )


def _cut(places: Iterable[Any], node: Node) -> UnsupportedOperationError:
    found = crossing(node)
    use = (
        f"`{graph.op(node)}` uses it with parts" if found is None else f"used for one with placements {list(found[2])}"
    )
    return UnsupportedOperationError(
        f"per_sample: a tensor with placements {list(places)} is converted to a plain tensor, and {use}: each rank "
        f"has only a part of its gradient, which to_local() treats as the whole. {_REDISTRIBUTE}",
        graph.op(node),
    )


def _whole(origin: str, what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: a part of an activation {origin} is made into {what}. The ranks then compute different values, "
        "and the gradient is ambiguous. Redistribute it first: redistribute(placements=[Replicate()]), "
        "output_layouts=Replicate() or full_tensor()."
    )
