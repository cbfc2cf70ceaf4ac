"""Inputs that need a gradient and are no parameters: whether samples may share their rows."""

from collections.abc import Iterable, Mapping

from torch.autograd.graph import Node

from ..._torch.nodes import output_shapes
from ..engine import Losses
from ..layout.owners import Owners
from ..ops.elementwise import is_elementwise
from ..ops.table import Step, entry_of
from ..ops.views import repeat
from ..owners.cuts import UseSite


def is_used_by_rows(
    leaf: Node, cuts: Iterable[UseSite], losses: Losses, owners: Mapping[Node, tuple[Owners, ...]]
) -> bool:
    """Return whether rows of an input, or of what was made from it for several samples, belong to one sample each.

    A mask that all samples share has none, nor has a table that is laid out over them.

    Args:
        leaf: the input.
        cuts: the uses of values that were made from parameters.
        losses: what is differentiated.
        owners: owners of the outputs of every op.
    """
    shared: dict[Node, set[int]] = {}
    for cut in cuts:
        shared.setdefault(losses.scan.nodes[cut.node], set()).add(cut.position)
    made = {leaf: None}
    frontier = [leaf]
    while frontier:
        value = frontier.pop()
        shapes = output_shapes([value])[value]
        for use in losses.read.consumers[value]:
            outs = owners.get(use.node)
            if outs is None or use.node in made:
                continue
            if Step(use.node, outs, use.position, shapes[use.output_nr]).sends().varies:
                return True
            if not all(one.is_proved for one in outs):
                made[use.node] = None
                frontier.append(use.node)
            elif _tells_apart(use.node, outs, made, shared.get(use.node, set())):
                return True
    return False


def _tells_apart(node: Node, outs: tuple[Owners, ...], made: Mapping[Node, None], shared: set[int]) -> bool:
    """Return whether outputs belong to different samples though all that an op computes with is shared by them."""
    entry = entry_of(node)
    if is_elementwise(node) or not any(one.varies for one in outs):
        return False
    if entry is not None and (entry.ids or entry.owners is repeat):
        return False
    beneath = [below for below, _ in node.next_functions]
    # What an op does not keep there is a weight that was left out, not data.
    may_be_data = range(len(beneath)) if entry is None or not entry.keeps else entry.keeps
    if any(beneath[i] is None for i in may_be_data if i < len(beneath)):
        return False
    return all(below is None or below in made or i in shared for i, below in enumerate(beneath))
