"""Find the cuts of a graph and the owners there: by proof, which is kept, or else by asking the engine every time."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial

from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch.signature import packed_nodes
from ...errors import BatchCouplingError, UnsupportedOperationError
from ..coupling.data_rows import DataRows, data_uses
from ..coupling.inputs import is_used_by_rows
from ..coupling.shared_values import refuse_shared_data, shared_input, used_in_parts
from ..engine import Losses
from ..layout.owners import Owners
from ..layout.samples import SampleLayout
from ..ops.table import moves_by_index
from ..owners.cuts import UseSite, find_cuts
from ..owners.model_tensors import ModelTensors
from ..owners.probe import probe
from ..owners.prove import prove
from .proofs import Proof, coarsest_eps, keeps_data, proof_of, try_to_prove


class Source(Enum):
    """How owners were found."""

    PROVED = "proved from the structure of the graph"
    FOLLOWED = "followed through the indices of this step"
    ASKED = "observed by running the engine at this step"
    ALONE = "not needed: there is a hook or a custom Function, so each loss is differentiated alone"


@dataclass(frozen=True, eq=False)
class Found:
    """Where shared values meet the data, and whose the gradient is there.

    Attributes:
        cuts: uses of shared values by ops whose outputs have owners.
        layouts: owners of the outputs of those ops.
        owners: the same, and those of ops that keep data.
        passed: those of the ops at cuts that a gradient goes through to reach others of them.
        ends: the rest of them.
        source: how owners were found.
        rows: which rows of data are used for which sample.
        eps: rounding of the coarsest dtype at a cut.
    """

    cuts: list[UseSite]
    layouts: dict[Node, tuple[SampleLayout, ...]]
    owners: Mapping[Node, tuple[Owners, ...]]
    passed: list[Node]
    ends: list[Node]
    source: Source
    rows: DataRows
    eps: float


def find(
    leaves: dict[Node, str], losses: Losses, known: ModelTensors, *, allow_coupling: bool, may_run: bool = True
) -> Found:
    """Return the cuts above some leaves and the owners there.

    Args:
        leaves: names of parameters by their nodes.
        losses: what is differentiated.
        known: what is no data.
        allow_coupling: accept data of one sample in the loss of another.
        may_run: whether the engine may be run to find out; else the structure of the graph has to show it.

    Raises:
        BatchCouplingError: the data of one sample enters the loss of another, and that was not allowed.
        UnsupportedOperationError: the engine would have to be run.
    """
    found = _proved(leaves, losses, known)
    if found is None:
        if not may_run:
            raise _not_shown()
        found = _asked(leaves, losses, known)
    if not allow_coupling:
        _refuse_coupling(found, losses, known)
        _refuse_coupling_below(leaves, found.cuts, losses, known, may_run=may_run)
    return found


def _not_shown() -> UnsupportedOperationError:
    return UnsupportedOperationError(
        "per_sample: a hook is registered on a value, an op, an input or a parameter that the losses depend on, and "
        "the structure of the graph does not show whether samples are kept apart. The engine would have to run to find "
        "out, and would give the hook gradients that are not those of the losses. Remove the hook, or pass all "
        "parameters and inputs that need no gradient; or pass allow_coupling=True."
    )


def _refuse_coupling(found: Found, losses: Losses, known: ModelTensors) -> None:
    found.rows.refuse_conflict()
    if found.source is Source.ASKED:
        in_parts = cache(partial(used_in_parts, losses.root, losses.sample_of, by_indices=True))
        refuse_shared_data(found.cuts, found.owners, found.rows, known, lambda node: node in in_parts())


def _refuse_coupling_below(
    leaves: dict[Node, str], cuts: list[UseSite], losses: Losses, known: ModelTensors, *, may_run: bool
) -> None:
    """Refuse coupling in the part of the graph below which lie only parameters that were not asked about, or inputs."""
    if len(leaves) == len(losses.scan.leaves):
        return
    others = [node for node in map(losses.scan.nodes.__getitem__, losses.scan.leaves) if node not in leaves]
    inputs = [node for node in others if known.is_input(node)]
    parameters = {node: "" for node in others if node not in inputs}
    if parameters:
        both = {**leaves, **parameters}
        found = _proved(both, losses, known)
        if found is None and not may_run:
            raise _not_shown()
        _refuse_coupling(found or _asked(both, losses, known), losses, known)
    batches = [node for node in inputs if known.may_hold_samples(graph.leaf_tensor(node))]
    if batches:
        owners = prove(losses.root, losses.sample_of, by_indices=True)
        known_here = [node for node in batches if node in owners and not owners[node][0].is_proved]
        doubtful = [node for node in known_here if is_used_by_rows(node, cuts, losses, owners)]
        if doubtful and (not may_run or any(graph.leaf_tensor(node)._backward_hooks for node in doubtful)):
            raise _not_shown()
        for node, layouts in probe(losses, doubtful).items():
            if layouts is None:
                raise shared_input(graph.leaf_tensor(node))


def _proved(leaves: dict[Node, str], losses: Losses, known: ModelTensors) -> Found | None:
    """Return what is proved, if it is beyond doubt that the shared values are made from parameters alone."""
    found = _applied(proof_of(leaves, losses), Source.PROVED, losses, known)
    if found is None and any(moves_by_index(node) for node in losses.scan.nodes):
        found = _applied(try_to_prove(leaves, losses, by_indices=True), Source.FOLLOWED, losses, known)
    return found


def _applied(proof: Proof | None, source: Source, losses: Losses, known: ModelTensors) -> Found | None:
    """Return what a proof says about this very graph."""
    if proof is None:
        return None
    nodes = losses.scan.nodes
    cuts = [
        UseSite(op, nodes[n], position, GradientEdge(nodes[value], nr), shape, tuple([nodes[leaf] for leaf in below]))
        for op, n, position, value, nr, shape, below in proof.cuts
    ]
    owners = {nodes[n]: found for n, found in proof.owners.items()}
    rows = DataRows(known, nodes, packed_nodes(owners))
    rows.add(proof.data)
    if proof.suspects:
        in_parts = partial(_is_in_parts, proof, losses, source is Source.FOLLOWED)
        try:
            refuse_shared_data([cuts[i] for i in proof.suspects], owners, rows, known, in_parts)
        except BatchCouplingError:
            return None  # structure alone may see more mixing than there is
    layouts = {nodes[n]: found for n, found in proof.layouts.items()}
    passed, ends = ([nodes[n] for n in some] for some in (proof.passed, proof.ends))
    return Found(cuts, layouts, owners, passed, ends, source, rows, proof.eps)


def _is_in_parts(proof: Proof, losses: Losses, by_indices: bool, node: Node) -> bool:
    nodes = losses.scan.nodes
    if not proof.in_parts:
        found = used_in_parts(losses.root, losses.sample_of, by_indices=by_indices)
        proof.in_parts.append(frozenset(n for n, one in enumerate(nodes) if one in found))
    return any(nodes[n] is node for n in proof.in_parts[0])


def _asked(leaves: dict[Node, str], losses: Losses, known: ModelTensors) -> Found:
    cuts, layouts = find_cuts(leaves, losses.read, partial(probe, losses))
    owners = {
        node: tuple(
            Owners.of_layout(layout, out.shape) for layout, out in zip(found, graph.describe(node), strict=True)
        )
        for node, found in layouts.items()
    }
    proved = prove(losses.root, losses.sample_of, by_indices=True)
    # Which loss uses data does not depend on hooks or zeros, so that structure tells it of ops that keep some.
    told = owners | {
        node: found
        for node, found in proved.items()
        if all(one.is_proved for one in found) and (node in owners or keeps_data(node, found))
    }
    rows = DataRows(known, losses.scan.nodes, packed_nodes(told))
    rows.add(data_uses(told, cuts, leaves, losses.scan))
    passed, ends = losses.passed_and_ends(layouts)
    return Found(cuts, layouts, owners, passed, ends, Source.ASKED, rows, coarsest_eps(layouts))
