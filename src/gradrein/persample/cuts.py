"""Find the cuts of a graph and the owners there: by proof, which is kept, or else by asking the engine every time."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch.signature import packed_nodes
from ..errors import BatchCouplingError, UnsupportedOperationError
from .coupling.data_rows import DataRows, DataUse, ModelTensors, data_uses
from .coupling.shared_values import is_used_by_rows, may_hold_constants, refuse_shared_data, shared_input, used_in_parts
from .engine import Losses
from .layout.owners import Owners
from .layout.samples import SampleLayout
from .ops.samplewise import declared
from .ops.table import moves_by_index
from .owners.cuts import UseSite, find_cuts
from .owners.probe import probe
from .owners.prove import prove

# How owners were found.
PROVED = "proved from the structure of the graph"
FOLLOWED = "followed through the indices of this step"
ASKED = "observed by running the engine at this step"
ALONE = "not needed: there is a hook or a custom Function, so each loss is differentiated alone"


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where shared values meet the data, and whose the gradient is there; nodes are numbers in `Scan.nodes`.

    Attributes:
        uses: uses of shared values by ops whose outputs have owners.
        layouts: owners of the outputs of those ops.
        owners: the same, and those of ops that keep data.
        data: what these keep.
        passed: those of the ops at cuts that a gradient goes through to reach others of them.
        ends: the rest of them.
        source: how owners were found.
        suspects: uses of values that may be made from more than parameters.
        in_parts: the nodes of which samples use different parts, once these were asked for.
    """

    uses: list[UseSite]
    layouts: dict[int, tuple[SampleLayout, ...]]
    owners: dict[int, tuple[Owners, ...]]
    data: list[DataUse]
    passed: list[int]
    ends: list[int]
    source: str
    suspects: list[UseSite] = field(default_factory=list)
    in_parts: list[frozenset[int]] = field(default_factory=list)


# What is proved by signature; None where nothing could be.
_PROOFS: OrderedDict[Any, Cuts | None] = OrderedDict()
_AT_MOST = 64


def find(
    leaves: Mapping[int, str], losses: Losses, known: ModelTensors, *, allow_coupling: bool, may_run: bool = True
) -> tuple[Cuts, DataRows]:
    """Return the cuts above some leaves and the owners there, and which rows of data are used for which sample.

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
    cuts, rows = _found(leaves, losses, known, may_run)
    if not allow_coupling:
        _refuse_coupling(cuts, rows, losses, known)
        if len(leaves) != len(losses.scan.leaves):
            _refuse_coupling_below(leaves, cuts.uses, losses, known, may_run)
    return cuts, rows


def _found(leaves: Collection[int], losses: Losses, known: ModelTensors, may_run: bool) -> tuple[Cuts, DataRows]:
    """Return what is proved, if it is beyond doubt that the shared values are made from parameters alone."""
    answer = _applied(_proof_of(leaves, losses), losses, known)
    if answer is None and any(moves_by_index(node) for node in losses.scan.nodes):
        answer = _applied(_try_to_prove(leaves, losses, by_indices=True), losses, known)
    if answer is None and not may_run:
        raise _not_shown()
    return answer or _asked(leaves, losses, known)


def _not_shown() -> UnsupportedOperationError:
    return UnsupportedOperationError(
        "per_sample: a hook is registered on a value, an op, an input or a parameter that the losses depend on, and "
        "the structure of the graph does not show whether samples are kept apart. The engine would have to run to find "
        "out, and would give the hook gradients that are not those of the losses. Remove the hook, or pass all "
        "parameters and inputs that need no gradient; or pass allow_coupling=True."
    )


def _refuse_coupling(cuts: Cuts, rows: DataRows, losses: Losses, known: ModelTensors) -> None:
    rows.refuse_conflict()
    if cuts.source is ASKED:
        in_parts = cache(partial(used_in_parts, losses.root, losses.sample_of, by_indices=True))
        refuse_shared_data(cuts.uses, cuts.owners, rows, known, lambda node: node in in_parts())


def _refuse_coupling_below(
    leaves: Collection[int], uses: list[UseSite], losses: Losses, known: ModelTensors, may_run: bool
) -> None:
    """Refuse coupling in the part of the graph below which lie only parameters that were not asked about, or inputs."""
    nodes, others = losses.scan.nodes, [i for i in losses.scan.leaves if i not in leaves]
    inputs = [i for i in others if known.is_input(nodes[i])]
    if len(inputs) < len(others):
        both = {*leaves, *others}.difference(inputs)
        _refuse_coupling(*_found(both, losses, known, may_run), losses, known)
    batches = [nodes[i] for i in inputs if known.may_hold_samples(graph.leaf_tensor(nodes[i]))]
    if batches:
        owners = prove(losses.root, losses.sample_of, by_indices=True)
        unproved = [node for node in batches if node in owners and not owners[node][0].is_proved]
        doubtful = [node for node in unproved if is_used_by_rows(node, uses, losses, owners)]
        if doubtful and (not may_run or any(graph.leaf_tensor(node)._backward_hooks for node in doubtful)):
            raise _not_shown()
        for node, layouts in probe(losses, doubtful).items():
            if layouts is None:
                raise shared_input(graph.leaf_tensor(node))


def signature_of(losses: Losses) -> tuple[Any, ...]:
    """Return everything about a graph but its values."""
    return (losses.scan.signature, losses.samples, tuple(losses.sample_of.tolist()))


def _proof_of(leaves: Collection[int], losses: Losses) -> Cuts | None:
    """Return what is proved about the cuts above some leaves, for every graph of this form; None if nothing is."""
    asked = tuple([i for i in losses.scan.leaves if i in leaves])
    key = (signature_of(losses), asked, declared() if losses.scan.custom else ())
    with suppress(KeyError):  # another thread may just have dropped it
        _PROOFS.move_to_end(key)
        return _PROOFS[key]
    proof = _PROOFS[key] = _try_to_prove(leaves, losses)
    with suppress(KeyError):
        while len(_PROOFS) > _AT_MOST:
            _PROOFS.popitem(last=False)
    return proof


def _try_to_prove(leaves: Collection[int], losses: Losses, *, by_indices: bool = False) -> Cuts | None:
    """Prove owners; what follows the indices of this very graph, `by_indices`, holds for it alone."""
    nodes, number = losses.scan.nodes, losses.number
    owners = prove(losses.root, losses.sample_of, by_indices=by_indices)
    if any(nodes[i] not in owners for i in leaves):
        return None

    def owners_of(some: Iterable[Node]) -> dict[Node, tuple[SampleLayout, ...] | None]:
        proved = {node: all(one.is_proved for one in owners[node]) for node in some}
        return {n: tuple(one.layout(losses.samples) for one in owners[n]) if proved[n] else None for n in proved}

    uses, layouts = find_cuts(leaves, losses, owners_of)
    if any(use.node not in layouts for use in uses):
        return None
    kept = {number[n]: owners[n] for n in nodes if number[n] in layouts or _keeps_data(n, owners.get(n, ()))}
    cuts = _cuts(uses, layouts, kept, leaves, losses, FOLLOWED if by_indices else PROVED)
    parameters = {nodes[i] for i in leaves}
    made = [(use, GradientEdge(nodes[use.value], use.output_nr)) for use in uses if use.value not in leaves]
    return replace(cuts, suspects=[use for use, value in made if may_hold_constants(value, parameters)])


def _cuts(
    uses: list[UseSite],
    layouts: dict[int, tuple[SampleLayout, ...]],
    owners: dict[int, tuple[Owners, ...]],
    leaves: Collection[int],
    losses: Losses,
    source: str,
) -> Cuts:
    nodes, number = losses.scan.nodes, losses.number
    passed, ends = ([number[node] for node in some] for some in losses.passed_and_ends(nodes[i] for i in layouts))
    data = data_uses(owners, uses, leaves, losses.scan)
    return Cuts(uses, layouts, owners, data, passed, ends, source)


def _applied(cuts: Cuts | None, losses: Losses, known: ModelTensors) -> tuple[Cuts, DataRows] | None:
    """Return what a proof says about this very graph."""
    if cuts is None:
        return None
    rows = _rows(cuts, losses, known)
    if cuts.suspects:
        in_parts = partial(_is_in_parts, cuts, losses)
        try:
            refuse_shared_data(cuts.suspects, cuts.owners, rows, known, in_parts)
        except BatchCouplingError:
            return None  # structure alone may see more mixing than there is
    return cuts, rows


def _rows(cuts: Cuts, losses: Losses, known: ModelTensors) -> DataRows:
    nodes = losses.scan.nodes
    rows = DataRows(known, nodes, packed_nodes([nodes[i] for i in cuts.owners]))
    rows.add(cuts.data)
    return rows


def _is_in_parts(cuts: Cuts, losses: Losses, node: Node) -> bool:
    if not cuts.in_parts:
        parts = used_in_parts(losses.root, losses.sample_of, by_indices=cuts.source is FOLLOWED)
        cuts.in_parts.append(frozenset(losses.number[one] for one in parts))
    return losses.number[node] in cuts.in_parts[0]


def _asked(leaves: Collection[int], losses: Losses, known: ModelTensors) -> tuple[Cuts, DataRows]:
    uses, layouts = find_cuts(leaves, losses, partial(probe, losses))
    observed = {
        i: tuple(
            Owners.of_layout(layout, out.shape)
            for layout, out in zip(outs, graph.describe(losses.scan.nodes[i]), strict=True)
        )
        for i, outs in layouts.items()
    }
    # Which loss uses data does not depend on hooks or zeros, so that structure tells it of ops that keep some.
    proved = prove(losses.root, losses.sample_of, by_indices=True)
    told = observed | {
        losses.number[node]: outs
        for node, outs in proved.items()
        if all(one.is_proved for one in outs) and (losses.number[node] in observed or _keeps_data(node, outs))
    }
    rows = _rows(_cuts(uses, layouts, told, leaves, losses, ASKED), losses, known)
    return _cuts(uses, layouts, observed, leaves, losses, ASKED), rows


def _keeps_data(node: Node, owners: tuple[Owners, ...]) -> bool:
    """Return whether an op of which the owners are proved has an input that needs no gradient."""
    return any(below is None for below, _ in node.next_functions) and bool(owners) and owners[0].is_proved
