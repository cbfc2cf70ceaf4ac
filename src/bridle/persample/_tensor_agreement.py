"""Ranks of a tensor-parallel mesh agree that they have recorded one model on the same samples."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .. import graph
from .._distributed.agreement import Agreement
from .._distributed.fingerprints import fingerprint
from .._distributed.meshes import Group
from .._torch.dtensor import crossing, grad_placements
from .._torch.nodes import output_shapes
from .._torch.signature import kind_of, packed_nodes
from ..errors import BridleError
from . import engine
from ._tensor_copies import Copy, copies, copies_of_parameters, copy_of_losses, described, first_difference, number_of
from ._tensor_ranks import TensorRanks
from ._tensor_regions import Regions, read_regions
from .engine import Losses
from .ownership.hooks import is_hooked

_WHAT = "per-sample gradients"


def agree(ranks: TensorRanks, leaves: Mapping[str, Any], losses: Losses) -> None:
    """Compare what each rank has recorded, its losses, and what it holds like the others.

    One message; a second one where saved-tensor hooks, such as those of a checkpoint, have packed something.

    Raises:
        RankError: they are not those of the same samples and the same model.
        UnsupportedOperationError: parts of tensors are used as if they were whole, or the other way round.
        InplaceModifiedError: something was changed in place.
    """
    regions = read_regions(leaves, losses)
    if not ranks.groups:
        return
    asked = _Asked(ranks, leaves, losses, regions)
    with engine.explain_errors("the graph of the losses"):
        packed = packed_nodes(losses.scan.nodes)
    ready = [node for node in losses.scan.nodes if node not in packed]
    of_losses = copy_of_losses(losses, ranks.dims)
    known: dict[Any, torch.Tensor] = {}

    def read() -> list[Copy]:
        saved = copies(ready, regions, ranks.dims, known)
        return [of_losses, *saved, *copies_of_parameters(leaves.values(), ranks.dims, known)]

    asked.compare(read)
    if packed:  # a checkpoint computes its region again, with collectives of its own: only now are ranks known to agree
        rest = [node for node in losses.scan.nodes if node in packed]
        asked.compare(partial(engine.inside_engine, partial(copies, rest, regions, ranks.dims, None)))


class _Asked:
    """What the ranks are asked about."""

    def __init__(self, ranks: TensorRanks, leaves: Mapping[str, Any], losses: Losses, regions: Regions) -> None:
        self._ranks = ranks
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._same = {"the number of samples": losses.samples}
        self._compared = {
            "the recorded graph": _recorded(losses, regions),
            "the parameters that were passed": _passed(leaves, losses),
            "`sample_groups`": fingerprint(losses.sample_of.tolist()),
        }

    def compare(self, read: Callable[[], list[Copy]]) -> None:
        """Compare copies; an error of this rank when they are read stops the others."""
        agreement = Agreement(_WHAT, "per_sample")
        found, error = [], None
        try:
            found = read()
        except BridleError as raised:
            error = raised
            agreement.fail(str(raised))
        for dim, group in zip(self._ranks.dims, self._ranks.groups, strict=True):
            there = Group(group.group_name, group, self._ranks.device)
            number = number_of(found, dim)
            sent = torch.cat([number, -number])
            most, least = agreement.all_reduce(sent, there, self._same, self._compared, largest=True).chunk(2)
            if bool((most + least).any()):
                self._fail(first_difference(found, dim, there, agreement), agreement)
        if len(self._ranks.groups) > 1:  # those of another row of the mesh may have found nothing
            for group in self._ranks.groups:
                there = Group(group.group_name, group, self._ranks.device)
                agreement.all_reduce(torch.zeros(0, dtype=torch.float64), there, self._same, self._compared)
        if error is not None:
            raise error
        agreement.finish()

    def _fail(self, differs: Copy | None, agreement: Agreement) -> None:
        if differs is not None:
            agreement.fail(
                f"per_sample: {described(differs, self._names)} is not the same on all ranks of the tensor-parallel "
                "mesh. They have to be given the same samples and targets, draw the same random numbers where each "
                "has the whole of a tensor (seed dropout alike), hold the same plain parameters, and make losses from "
                "whole outputs: pass output_layouts=Replicate() to the last layer, or call full_tensor()."
            )


def _passed(leaves: Mapping[str, Any], losses: Losses) -> int:
    """Return a number for the names of parameters and where in the graph each of them is."""
    number = {id(tensor): i for i, tensor in losses.scan.leaves.items()}
    return fingerprint([(name, number.get(id(leaf))) for name, leaf in leaves.items()])


def _recorded(losses: Losses, regions: Regions) -> int:
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
