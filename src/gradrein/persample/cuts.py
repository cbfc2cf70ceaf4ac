"""Find the cuts of a graph and the owners there: by proof, which is kept, or else by observing each step anew."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch.saved import packed_nodes
from ..errors import BatchCouplingError
from . import tracing
from .coupling.data_rows import DataRows, DataUse, ModelTensors, coupling_error, data_uses
from .coupling.shared_values import (
    is_used_by_rows,
    may_hold_constants,
    partly_used_ops,
    refuse_shared_data,
)
from .engine import Losses
from .layout import Owners
from .ops.indexing import moved_by
from .ops.samplewise import declared
from .ops.table import moves_by_index
from .owners.observe import observe
from .owners.prove import prove
from .owners.use_sites import UseSite, find_use_sites

# How owners were found.
PROVED = "proved from the structure of the graph"
FOLLOWED = "followed through the indices of this step"
OBSERVED = "observed by running the engine at this step"
ALONE = "not needed: there is a hook or a custom Function, so each loss is differentiated alone"


@dataclass(frozen=True, eq=False)
class Cuts:
    """Where shared values meet the data, and whose the gradient is there; nodes are numbers in `Scan.nodes`.

    Attributes:
        uses: uses of shared values by ops whose outputs have owners.
        owners: owners of the outputs of those ops, and of ops that keep data.
        data: what these keep.
        stops: those of the ops at cuts below which there is no other; the engine does not run them.
        source: how owners were found.
        doubtful: uses of values that may be made from more than parameters.
        partly_used: the nodes of which samples use different parts, once these were asked for.
    """

    uses: list[UseSite]
    owners: dict[int, tuple[Owners, ...]]
    data: list[DataUse]
    stops: list[int]
    source: str
    doubtful: list[UseSite] = field(default_factory=list)
    partly_used: list[frozenset[int]] = field(default_factory=list)


# What is proved by signature; None where nothing could be.
_PROOFS: OrderedDict[Any, Cuts | None] = OrderedDict()
# What was followed in the last graph of a signature, and through which indices.
_FOLLOWED: OrderedDict[Any, tuple[Tensor, Cuts | None]] = OrderedDict()
_AT_MOST, _AT_MOST_FOLLOWED = 64, 8


def find_cuts(
    leaves: Mapping[int, str], losses: Losses, known: ModelTensors, *, allow_coupling: bool
) -> tuple[Cuts, DataRows]:
    """Return the cuts above some leaves and the owners there, and which rows of data are used for which sample.

    Args:
        leaves: names of parameters by their nodes.
        losses: what is differentiated.
        known: what is no data.
        allow_coupling: accept data of one sample in the loss of another.

    Raises:
        BatchCouplingError: the data of one sample enters the loss of another, and that was not allowed.
        UnsupportedOperationError: the engine would have to be run, and there are hooks.
    """
    cuts, rows = _surest(leaves, losses, known)
    if allow_coupling:
        rows = DataRows(known, losses.scan.nodes, rows.packed)  # nobody looks for conflicts
    else:
        _refuse_coupling(cuts, rows, losses)
        if len(leaves) != len(losses.scan.leaves):
            _refuse_coupling_below(leaves, cuts.uses, losses, known)
    return cuts, rows


def _surest(leaves: Collection[int], losses: Losses, known: ModelTensors) -> tuple[Cuts, DataRows]:
    """Return what is proved, if it is beyond doubt that the shared values are made from parameters alone."""
    which = tuple([i for i in losses.scan.leaves if i in leaves])
    key = (signature_of(losses), which, declared() if losses.scan.custom else ())
    answer = _applied(_proof_of(key, leaves, losses), losses, known)
    if answer is None and (moving := [node for node in losses.scan.nodes if moves_by_index(node)]):
        _PROOFS[key] = None  # refused once: from now on the indices are followed at once, which show more
        answer = _applied(_followed(key, moving, leaves, losses), losses, known)
    return answer or _observed(leaves, losses, known)


def _refuse_coupling(cuts: Cuts, rows: DataRows, losses: Losses) -> None:
    rows.refuse_conflict()
    if cuts.source is OBSERVED:
        refuse_shared_data(cuts.uses, cuts.owners, rows, partial(_is_partly_used, cuts, losses))


def _refuse_coupling_below(leaves: Collection[int], uses: list[UseSite], losses: Losses, known: ModelTensors) -> None:
    """Refuse coupling in the part of the graph below which lie only parameters that were not asked about, or inputs."""
    nodes, others = losses.scan.nodes, [i for i in losses.scan.leaves if i not in leaves]
    inputs = [i for i in others if known.is_input(nodes[i])]
    if len(inputs) < len(others):
        both = {*leaves, *others}.difference(inputs)
        _refuse_coupling(*_surest(both, losses, known), losses)
    batches = [nodes[i] for i in inputs if known.may_hold_samples(graph.leaf_tensor(nodes[i]).shape)]
    if batches:
        owners = prove(losses.root, losses.sample_of, by_indices=True)
        unproved = [node for node in batches if node in owners and not owners[node][0].is_proved]
        in_question = [node for node in unproved if is_used_by_rows(node, uses, losses, owners)]
        # A hook on an input runs only where the gradient there is observed.
        losses.has_hooks |= any(graph.leaf_tensor(node)._backward_hooks for node in in_question)
        for node, observed in observe(losses, in_question).items():
            if observed is None:
                shape = tuple(graph.leaf_tensor(node).shape)
                raise coupling_error(f"rows of an input of shape {shape} enter the losses of several samples", "", "")


def signature_of(losses: Losses) -> tuple[Any, ...]:
    """Return everything about a graph but its values."""
    return (losses.scan.signature, losses.samples, losses.sample_of)


def _proof_of(key: Any, leaves: Collection[int], losses: Losses) -> Cuts | None:
    """Return what is proved about the cuts above some leaves, for every graph of this form; None if nothing is."""
    with suppress(KeyError):  # another thread may just have dropped it
        _PROOFS.move_to_end(key)
        return _PROOFS[key]
    proof = _PROOFS[key] = _try_to_prove(leaves, losses)
    _forget_oldest(_PROOFS, _AT_MOST)
    return proof


def _followed(key: Any, moving: Sequence[Node], leaves: Collection[int], losses: Losses) -> Cuts | None:
    """Return what follows from a signature and indices: as it was in the last such graph, while these are the same."""
    if tracing.is_traced():  # there are no indices yet
        return _try_to_prove(leaves, losses, by_indices=True)
    indices, (before, cuts) = moved_by(moving), _FOLLOWED.pop(key, (None, None))
    if before is None or not indices.equal(before):
        cuts = _try_to_prove(leaves, losses, by_indices=True)
    _FOLLOWED[key] = indices, cuts
    _forget_oldest(_FOLLOWED, _AT_MOST_FOLLOWED)
    return cuts


def _forget_oldest(known: OrderedDict[Any, Any], at_most: int) -> None:
    with suppress(KeyError):  # another thread may drop them, too
        while len(known) > at_most:
            known.popitem(last=False)


def _try_to_prove(leaves: Collection[int], losses: Losses, *, by_indices: bool = False) -> Cuts | None:
    """Prove owners; what follows the indices of this very graph, `by_indices`, holds for it alone."""
    nodes, number = losses.scan.nodes, losses.number
    owners = prove(losses.root, losses.sample_of, by_indices=by_indices)
    if any(nodes[i] not in owners for i in leaves):
        return None

    def proved(some: Iterable[Node]) -> dict[Node, tuple[Owners, ...] | None]:
        return {node: owners[node] if all(one.is_proved for one in owners[node]) else None for node in some}

    uses, at_cuts = find_use_sites(leaves, losses, proved)
    if any(use.node not in at_cuts for use in uses):
        return None
    kept = {number[n]: owners[n] for n in nodes if number[n] in at_cuts or _keeps_data(n, owners.get(n, ()))}
    cuts = _cuts(uses, kept, leaves, losses, FOLLOWED if by_indices else PROVED)
    parameters = {nodes[i] for i in leaves}
    made = [(use, GradientEdge(nodes[use.value], use.output_nr)) for use in uses if use.value not in leaves]
    return replace(cuts, doubtful=[use for use, value in made if may_hold_constants(value, parameters)])


def _observed(leaves: Collection[int], losses: Losses, known: ModelTensors) -> tuple[Cuts, DataRows]:
    uses, owners = find_use_sites(leaves, losses, partial(observe, losses))
    # Which loss uses data does not depend on hooks or zeros, so that structure tells it of ops that keep some.
    for node, outs in prove(losses.root, losses.sample_of, by_indices=True).items():
        i = losses.number[node]
        if all(one.is_proved for one in outs) and (i in owners or _keeps_data(node, outs)):
            owners[i] = outs
    cuts = _cuts(uses, owners, leaves, losses, OBSERVED)
    return cuts, _rows(cuts, losses, known)


def _cuts(
    uses: list[UseSite],
    owners: dict[int, tuple[Owners, ...]],
    leaves: Collection[int],
    losses: Losses,
    source: str,
) -> Cuts:
    nodes, at_cuts = losses.scan.nodes, dict.fromkeys(use.node for use in uses)
    above = losses.read.leading_to({nodes[i] for i in at_cuts})
    owners = {i: tuple(replace(one, samples=losses.samples) for one in outs) for i, outs in owners.items()}
    data = data_uses(owners, uses, leaves, losses.scan)
    return Cuts(uses, owners, data, [i for i in at_cuts if nodes[i] not in above], source)


def _applied(cuts: Cuts | None, losses: Losses, known: ModelTensors) -> tuple[Cuts, DataRows] | None:
    """Return what a proof says about this very graph."""
    if cuts is None:
        return None
    rows = _rows(cuts, losses, known)
    if cuts.doubtful:
        try:
            refuse_shared_data(cuts.doubtful, cuts.owners, rows, partial(_is_partly_used, cuts, losses))
        except BatchCouplingError:
            return None  # structure alone may see more mixing than there is
    return cuts, rows


def _rows(cuts: Cuts, losses: Losses, known: ModelTensors) -> DataRows:
    nodes = losses.scan.nodes
    rows = DataRows(known, nodes, packed_nodes([nodes[i] for i in cuts.owners]))
    rows.add(cuts.data)
    return rows


def _is_partly_used(cuts: Cuts, losses: Losses, node: Node) -> bool:
    """Return whether samples use different parts of what an op made."""
    if not cuts.partly_used:
        ops = partly_used_ops(losses.root, losses.sample_of, by_indices=cuts.source is not PROVED)
        cuts.partly_used.append(frozenset(losses.number[one] for one in ops))
    return losses.number[node] in cuts.partly_used[0]


def _keeps_data(node: Node, owners: tuple[Owners, ...]) -> bool:
    """Return whether an op of which the owners are proved has an input that needs no gradient."""
    return any(below is None for below, _ in node.next_functions) and bool(owners) and owners[0].is_proved
