"""What is proved about a form of graph, kept for all graphs of that form."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import Node

from ..._torch.nodes import output_dtypes
from ..coupling.data_rows import DataUse, data_uses
from ..coupling.shared_values import may_hold_constants
from ..engine import Losses
from ..layout.owners import Owners
from ..layout.samples import SampleLayout
from ..owners.cuts import UseSite, find_cuts
from ..owners.prove import prove

NumberedCut: TypeAlias = tuple[str, int, int, int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Proof:
    """What was proved for a signature; nodes are numbers in the order of `Scan.nodes`.

    Attributes:
        cuts: op, node, position, node of the value, its output, its shape, and leaves below it.
        layouts: owners at the cuts.
        owners: owners of the outputs of ops at cuts, and of ops that keep data.
        data: what these keep.
        passed: ops at cuts that a gradient goes through to reach others of them.
        ends: the rest of them.
        suspects: cuts whose value may be made from more than parameters.
        in_parts: the nodes of which samples use different parts, once these were asked for.
        eps: rounding of the coarsest dtype at a cut.
    """

    cuts: list[NumberedCut]
    layouts: dict[int, tuple[SampleLayout, ...]]
    owners: dict[int, tuple[Owners, ...]]
    data: list[DataUse]
    passed: list[int]
    ends: list[int]
    suspects: list[int]
    eps: float
    in_parts: list[frozenset[int]] = field(default_factory=list)


# What is proved by signature; None where nothing could be.
_PROOFS: OrderedDict[Any, Proof | None] = OrderedDict()
_AT_MOST = 64
_UNSEEN = Proof([], {}, {}, [], [], [], [], 0.0)


def signature_of(losses: Losses) -> tuple[Any, ...]:
    """Return everything about a graph but its values."""
    return (losses.scan.signature, losses.samples, tuple(losses.sample_of.tolist()))


def proof_of(leaves: Collection[Node], losses: Losses) -> Proof | None:
    """Return what is proved about the cuts above some leaves, for every graph of this form; None if nothing is."""
    nodes = losses.scan.nodes
    key = (signature_of(losses), tuple([i for i in losses.scan.leaves if nodes[i] in leaves]))
    found = _PROOFS.get(key, _UNSEEN)
    if found is _UNSEEN:
        found = _PROOFS[key] = try_to_prove(leaves, losses)
        with suppress(KeyError):
            while len(_PROOFS) > _AT_MOST:
                _PROOFS.popitem(last=False)
    else:
        with suppress(KeyError):  # another thread may just have dropped it
            _PROOFS.move_to_end(key)
    return found


def try_to_prove(leaves: Collection[Node], losses: Losses, *, by_indices: bool = False) -> Proof | None:
    """Prove owners; what follows the indices of this very graph, `by_indices`, holds for it alone."""
    owners = prove(losses.root, losses.sample_of, by_indices=by_indices)
    if any(node not in owners for node in leaves):
        return None

    def owners_of(nodes: Iterable[Node]) -> dict[Node, tuple[SampleLayout, ...] | None]:
        return {
            node: tuple(one.layout(losses.samples) for one in owners[node])
            if all(one.is_proved for one in owners[node])
            else None
            for node in nodes
        }

    cuts, layouts = find_cuts(leaves, losses.read, owners_of)
    if any(cut.node not in layouts for cut in cuts):
        return None
    nodes = losses.scan.nodes
    number = {node: i for i, node in enumerate(nodes)}
    kept = {node: owners[node] for node in nodes if node in layouts or keeps_data(node, owners.get(node, ()))}
    passed, ends = losses.passed_and_ends(layouts)
    return Proof(
        [_numbered(cut, number) for cut in cuts],
        {number[node]: found for node, found in layouts.items()},
        {number[node]: found for node, found in kept.items()},
        data_uses(kept, cuts, leaves, losses.scan),
        [number[node] for node in passed],
        [number[node] for node in ends],
        [i for i, cut in enumerate(cuts) if cut.value.node not in leaves and may_hold_constants(cut.value, leaves)],
        coarsest_eps(layouts),
    )


def _numbered(cut: UseSite, number: Mapping[Node, int]) -> NumberedCut:
    node, position, (value, output_nr, *_), leaves = cut.node, cut.position, cut.value, cut.leaves
    return cut.op, number[node], position, number[value], output_nr, cut.shape, tuple([number[leaf] for leaf in leaves])


def coarsest_eps(nodes: Iterable[Node]) -> float:
    """Return the rounding of the coarsest dtype among the outputs of these ops."""
    return max((torch.finfo(dtype).eps for dtype in output_dtypes(nodes) if dtype.is_floating_point), default=0.0)


def keeps_data(node: Node, owners: tuple[Owners, ...]) -> bool:
    """Return whether an op of which the owners are proved has an input that needs no gradient."""
    return any(below is None for below, _ in node.next_functions) and bool(owners) and owners[0].is_proved
