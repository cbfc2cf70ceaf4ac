"""Find the cuts of a graph and the owners there: by proof, which is kept, or else by asking the engine every time."""

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import hooks as torch_hooks
from ..._torch.signature import signature
from ...errors import BatchCouplingError, UnsupportedOperationError
from .._losses import Losses
from .coupling import DataRows, Known, may_hold_constants, refuse_shared_data, shared_input
from .cuts import UseSite, find_cuts
from .hooks import hooks_since
from .layout import SampleLayout
from .ops import Step, moves_by_index
from .owners import Owners
from .prove import prove


class Source(Enum):
    """How owners were found."""

    PROVED = "proved from the structure of the graph"
    FOLLOWED = "followed through the indices of this step"
    ASKED = "asked of the engine at this step"


@dataclass(frozen=True, eq=False)
class Found:
    """Where shared values meet the data, and whose the gradient is there.

    Attributes:
        cuts: uses of shared values by ops whose outputs have owners.
        layouts: owners of the outputs of those ops.
        owners: the same, and those of ops that keep data.
        source: how they were found.
        rows: which rows of data are used for which sample.
        hooks: how many hooks may have been registered on this graph; None if unknown.
    """

    cuts: list[UseSite]
    layouts: dict[Node, tuple[SampleLayout, ...]]
    owners: Mapping[Node, tuple[Owners, ...]]
    source: Source
    rows: DataRows
    hooks: int | None


@dataclass(frozen=True, eq=False)
class _Proof:
    """What was proved for a signature; nodes are numbers in the order of the graph.

    Attributes:
        cuts: node, position, node of the value, its output.
        layouts: owners at the cuts.
        owners: owners of the outputs of ops at cuts, and of ops that keep data.
        suspects: cuts whose value may be made from more than parameters.
    """

    cuts: tuple[tuple[int, int, int, int], ...]
    layouts: dict[int, tuple[SampleLayout, ...]]
    owners: dict[int, tuple[Owners, ...]]
    suspects: tuple[int, ...]


# What is proved by signature; None where nothing could be.
_PROOFS: OrderedDict[Any, _Proof | None] = OrderedDict()
_AT_MOST = 64


def find(leaves: dict[Node, str], losses: Losses, known: Known, *, allow_coupling: bool, hooks_allowed: bool) -> Found:
    """Return the cuts above some leaves and the owners there.

    Args:
        leaves: names of parameters by their nodes.
        losses: what is differentiated.
        known: what is no data.
        allow_coupling: accept data of one sample in the loss of another.
        hooks_allowed: rely on proofs although hooks were registered: they are those that `fully_shard` sets.

    Raises:
        BatchCouplingError: the data of one sample enters the loss of another, and that was not allowed.
        UnsupportedOperationError: a hook stands at an op that uses a parameter.
    """
    hooks = hooks_since(losses.read)
    provable = hooks is not None and (hooks == 0 or hooks_allowed)
    found = _found(leaves, losses, known, hooks, provable)
    if hooks != 0:
        refuse_node_hooks(found.cuts)
    if not allow_coupling:
        _refuse_coupling(found, known)
        _refuse_coupling_below(leaves, losses, known, hooks, provable)
    return found


def _found(leaves: dict[Node, str], losses: Losses, known: Known, hooks: int | None, provable: bool) -> Found:
    proved = _proved(leaves, losses, known, hooks) if provable and hooks is not None else None
    return proved or _asked(leaves, losses, known, hooks)


def _refuse_coupling(found: Found, known: Known) -> None:
    found.rows.refuse_conflict()
    if found.source is Source.ASKED:
        refuse_shared_data(found.cuts, found.owners, found.rows, known)


def _refuse_coupling_below(
    leaves: dict[Node, str], losses: Losses, known: Known, hooks: int | None, provable: bool
) -> None:
    """Refuse coupling in the part of the graph below which lie only parameters that were not asked about, or inputs."""
    others = [node for node in losses.read.nodes if graph.is_leaf(node) and node not in leaves]
    inputs = [node for node in others if known.is_input(node)]
    parameters = {node: "" for node in others if node not in inputs}
    if parameters:
        _refuse_coupling(_found({**leaves, **parameters}, losses, known, hooks, provable), known)
    batches = [node for node in inputs if known.rows in graph.leaf_tensor(node).shape[:2]]
    if batches:
        owners = prove(losses.root, losses.sample_of)
        known_here = [node for node in batches if node in owners and not owners[node][0].is_proved]
        doubtful = [node for node in known_here if _has_rows(node, losses, owners)]
        for node, layouts in losses.owners(doubtful).items():
            if layouts is None:
                raise shared_input(graph.leaf_tensor(node))


def _has_rows(node: Node, losses: Losses, owners: Mapping[Node, tuple[Owners, ...]]) -> bool:
    """Return whether some op takes rows of an input for one sample each; a mask that all samples share has none."""
    shape = tuple(graph.leaf_tensor(node).shape)
    uses = [use for use in losses.read.consumers[node] if use.node in owners]
    return any(Step(use.node, owners[use.node], use.position, shape).sends().varies for use in uses)


def _proved(leaves: dict[Node, str], losses: Losses, known: Known, hooks: int) -> Found | None:
    """Return what is proved, if it is beyond doubt that the shared values are made from parameters alone."""
    found = _applied(_proof(leaves, losses), Source.PROVED, losses, known, hooks)
    if found is None and any(moves_by_index(node) for node in losses.read.nodes):
        found = _applied(_try_to_prove(leaves, losses, by_indices=True), Source.FOLLOWED, losses, known, hooks)
    return found


def _applied(proof: _Proof | None, source: Source, losses: Losses, known: Known, hooks: int) -> Found | None:
    """Return what a proof says about this very graph."""
    if proof is None:
        return None
    nodes = losses.read.nodes
    cuts = [UseSite(nodes[n], p, GradientEdge(nodes[v], nr)) for n, p, v, nr in proof.cuts]
    owners = {nodes[n]: found for n, found in proof.owners.items()}
    rows = DataRows(known, cuts)
    rows.add_all(owners)
    try:
        refuse_shared_data([cuts[i] for i in proof.suspects], owners, rows, known)
    except BatchCouplingError:
        return None  # structure alone may see more mixing than there is
    return Found(cuts, {nodes[n]: found for n, found in proof.layouts.items()}, owners, source, rows, hooks)


def _proof(leaves: dict[Node, str], losses: Losses) -> _Proof | None:
    wanted = tuple(i for i, node in enumerate(losses.read.nodes) if node in leaves)
    key = (signature_of(losses), wanted)
    if key not in _PROOFS:
        _PROOFS[key] = _try_to_prove(leaves, losses)
        if len(_PROOFS) > _AT_MOST:
            _PROOFS.popitem(last=False)
    _PROOFS.move_to_end(key)
    return _PROOFS[key]


def _try_to_prove(leaves: dict[Node, str], losses: Losses, *, by_indices: bool = False) -> _Proof | None:
    read = losses.read
    owners = prove(losses.root, losses.sample_of, by_indices=by_indices)
    if any(node not in owners for node in leaves):
        return None
    number = {node: i for i, node in enumerate(read.nodes)}

    def owners_of(nodes: Iterable[Node]) -> dict[Node, tuple[SampleLayout, ...] | None]:
        return {
            node: tuple(one.layout(losses.samples) for one in owners[node])
            if all(one.is_proved for one in owners[node])
            else None
            for node in nodes
        }

    cuts, layouts = find_cuts(leaves, read, owners_of)
    if any(cut.node not in layouts for cut in cuts):
        return None
    kept = [node for node in read.nodes if node in layouts or _keeps_data(node, owners.get(node, ()))]
    return _Proof(
        tuple((number[c.node], c.position, number[c.value.node], c.value.output_nr) for c in cuts),
        {number[node]: found for node, found in layouts.items()},
        {number[node]: owners[node] for node in kept},
        tuple(i for i, cut in enumerate(cuts) if may_hold_constants(cut.value, leaves)),
    )


def _keeps_data(node: Node, owners: tuple[Owners, ...]) -> bool:
    return bool(owners) and owners[0].is_proved and any(below is None for below, _ in node.next_functions)


def _asked(leaves: dict[Node, str], losses: Losses, known: Known, hooks: int | None) -> Found:
    cuts, layouts = find_cuts(leaves, losses.read, partial(losses.owners, hooked=hooks != 0))
    owners = {
        node: tuple(
            Owners.of_layout(layout, out.shape) for layout, out in zip(found, graph.describe(node), strict=True)
        )
        for node, found in layouts.items()
    }
    rows = DataRows(known, cuts)
    rows.add_all(owners | _structure(losses, owners))
    return Found(cuts, layouts, owners, Source.ASKED, rows, hooks)


def _structure(losses: Losses, asked: Container[Node]) -> dict[Node, tuple[Owners, ...]]:
    """Return what structure tells of ops that keep data: which loss uses it does not depend on hooks or zeros."""
    proved = prove(losses.root, losses.sample_of, by_indices=True)
    return {
        node: owners
        for node, owners in proved.items()
        if all(one.is_proved for one in owners) and (node in asked or _keeps_data(node, owners))
    }


def refuse_node_hooks(cuts: Iterable[UseSite]) -> None:
    """Refuse hooks on the very ops that use parameters: rules would go around them.

    Raises:
        UnsupportedOperationError: there is such a hook.
    """
    for node in dict.fromkeys(cut.node for cut in cuts):
        if torch_hooks.has_node_hooks(node):
            raise UnsupportedOperationError(
                f"per_sample: a hook is registered on `{graph.op(node)}`, which uses a parameter. It may change the "
                "gradient in a way that cannot be split by sample. Remove it, or register it on the tensor instead.",
                graph.op(node),
            )


def signature_of(losses: Losses) -> tuple[Any, ...]:
    """Return everything about a graph but its values."""
    nodes = losses.read.nodes
    inside = getattr(losses.root.grad_fn, "regions_inside", ())
    number = {node: i for i, node in enumerate(nodes)} if inside else {}
    regions = tuple((number[node], tuple(out is not None for out in outputs)) for node, outputs in inside)
    return (signature(nodes), regions, losses.samples, tuple(losses.sample_of.tolist()))
