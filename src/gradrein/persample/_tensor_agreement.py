"""Ranks of a tensor-parallel mesh agree that they have recorded one model on the same samples."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from .. import graph
from .._distributed.agreement import Agreement
from .._distributed.fingerprints import fingerprint
from .._torch.dtensor import crossing, grad_placements
from .._torch.nodes import output_shapes
from .._torch.signature import kind_of, packed_nodes
from . import engine
from ._tensor_copies import Copy, copies, copies_of_parameters, copy_of_losses, described, first_difference, number_of
from ._tensor_ranks import TensorRanks
from ._tensor_regions import Regions, read_regions
from .cuts.hooks import is_hooked
from .engine import Losses

_WHAT = "per-sample gradients"


@dataclass(frozen=True, eq=False)
class _Recorded:
    """What a rank has recorded.

    Attributes:
        same: what must be the same on every rank, in words or numbers to be shown.
        compared: fingerprints that must be the same.
        copies: what the ranks are to hold alike.
        regions: what the outputs of ops are.
        packed: ops of which saved-tensor hooks have packed something.
    """

    same: Mapping[str, Any]
    compared: Mapping[str, int]
    copies: list[Copy]
    regions: Regions
    packed: list[Node]


def agree(ranks: TensorRanks, leaves: Mapping[str, Any], losses: Losses, settings: Mapping[str, Any]) -> None:
    """Compare what each rank has recorded, its losses, and what it holds like the others.

    One message; a second one where saved-tensor hooks, such as those of a checkpoint, have packed something. An error
    of this rank stops the others as well.

    Args:
        ranks: the ranks.
        leaves: the parameters, by name.
        losses: what is differentiated.
        settings: what else must be the same on every rank, in words or numbers to be shown.

    Raises:
        RankError: they are not those of the same samples and the same model.
        UnsupportedOperationError: parts of tensors are used as if they were whole, or the other way round.
        InplaceModifiedError: something was changed in place.
    """
    if not ranks.groups:
        read_regions(leaves, losses)
        return
    names = {id(leaf): name for name, leaf in leaves.items()}
    found = _compare(ranks, names, partial(_read, ranks, leaves, losses, settings))
    if found.packed:  # a checkpoint computes its region again, with collectives of its own: only now do ranks agree
        unpacked = partial(engine.inside_engine, partial(copies, found.packed, found.regions, ranks.dims, None))
        _compare(ranks, names, lambda: replace(found, copies=unpacked()))


def tell(ranks: TensorRanks, error: Exception) -> None:
    """Tell those who are about to agree that this rank has raised an error."""

    def fail() -> _Recorded:
        raise error

    if ranks.groups:
        with suppress(type(error)):
            _compare(ranks, {}, fail)


def _read(ranks: TensorRanks, leaves: Mapping[str, Any], losses: Losses, settings: Mapping[str, Any]) -> _Recorded:
    regions = read_regions(leaves, losses)
    with engine.explain_errors("the graph of the losses"):
        packed = packed_nodes(losses.scan.nodes)
    compared = {
        "the recorded graph": _graph(losses, regions),
        "the parameters that were passed": _passed(leaves, losses),
        "`sample_groups`": fingerprint(losses.sample_of.tolist()),
        "which saved tensors are packed, as by a checkpoint": fingerprint([n in packed for n in losses.scan.nodes]),
    }
    known: dict[Any, torch.Tensor] = {}
    held = [
        copy_of_losses(losses, ranks.dims),
        *copies([node for node in losses.scan.nodes if node not in packed], regions, ranks.dims, known),
        *copies_of_parameters(leaves.values(), ranks.dims, known),
    ]
    waiting = [node for node in losses.scan.nodes if node in packed]
    return _Recorded({"the number of samples": losses.samples, **settings}, compared, held, regions, waiting)


def _compare(ranks: TensorRanks, names: Mapping[int, str], read: Callable[[], _Recorded]) -> _Recorded:
    """Compare what ranks have recorded; an error of this rank when it is read stops the others."""
    agreement = Agreement(_WHAT, "per_sample")
    recorded, error = _Recorded({}, {}, [], Regions(), []), None
    try:
        recorded = read()
    except Exception as raised:  # whatever it is, the others wait
        error = raised
        agreement.fail(f"{type(raised).__name__}: {raised}")
    for dim, group in zip(ranks.dims, ranks.messages(), strict=True):
        number = number_of(recorded.copies, dim)
        sent = torch.cat([number, -number])
        found = agreement.all_reduce(sent, group, recorded.same, recorded.compared, largest=True)
        most, least = found.chunk(2)
        if bool((most + least).any()):
            _fail(first_difference(recorded.copies, dim, group, agreement), names, agreement)
    if len(ranks.groups) > 1:  # those of another row of the mesh may have found nothing
        agreement.tell(ranks.messages())
    if error is not None:
        raise error
    agreement.finish()
    return recorded


def _fail(differs: Copy | None, names: Mapping[int, str], agreement: Agreement) -> None:
    if differs is not None:
        agreement.fail(
            f"per_sample: {described(differs, names)} is not the same on all ranks of the tensor-parallel "
            "mesh. They have to be given the same samples and targets, draw the same random numbers where each "
            "has the whole of a tensor (seed dropout alike), hold the same plain parameters, and make losses from "
            "whole outputs: pass output_layouts=Replicate() to the last layer, or call full_tensor()."
        )


def _passed(leaves: Mapping[str, Any], losses: Losses) -> int:
    """Return a number for the names of parameters and where in the graph each of them is."""
    number = {id(tensor): i for i, tensor in losses.scan.leaves.items()}
    return fingerprint([(name, number.get(id(leaf))) for name, leaf in leaves.items()])


def _graph(losses: Losses, regions: Regions) -> int:
    """Return a number for ops, edges, shapes and flags.

    Where they are the same so are the owners of all elements. Shards of one tensor may differ in their sizes, but not
    where a rank may cut a whole tensor by itself: another size may be another part.
    """
    number = {node: i for i, node in enumerate(losses.scan.nodes)}
    facts: list[Any] = [is_hooked(losses.scan, sharded=True)]  # a rank that has one of its own would stop alone
    for node, outs in output_shapes(losses.scan.nodes).items():
        lenient = bool(regions.varies.get(node)) and not regions.summed
        kind, found = kind_of(node), crossing(node)
        facts += (graph.op(node), [len(out) for out in outs] if lenient else outs)
        facts += [(number.get(used), nr) if used is not None else None for used, nr in node.next_functions]
        facts += [_flag(getattr(node, name)) for name in kind.values if not (lenient and "size" in name)]
        facts += [] if found is None else [found[2], grad_placements(node)]
    return fingerprint(facts)


def _flag(value: Any) -> Any:
    """Return a size, dim or flag; of anything else, such as a device or a function, its type."""
    if isinstance(value, tuple | list):
        return [_flag(item) for item in value]
    return value if isinstance(value, int | float | complex | str | None) else type(value).__name__
