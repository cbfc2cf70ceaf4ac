"""Inputs that need a gradient and are no parameters: whether samples may share their rows."""

from collections.abc import Iterable, Mapping

from torch.autograd.graph import Node

from ..._torch.nodes import output_shapes
from ..engine import Losses
from .cuts import UseSite
from .data_rows import LOOK_UPS, may_be_data
from .ops import MOVES, Step, base_name, elementwise
from .owners import Owners


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
        shared.setdefault(cut.node, set()).add(cut.position)
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
    op = base_name(node)
    if MOVES.get(op) is elementwise or op in LOOK_UPS or op == "Repeat" or not any(one.varies for one in outs):
        return False
    beneath = [below for below, _ in node.next_functions]
    if any(below is None and may_be_data(op, i) for i, below in enumerate(beneath)):
        return False
    return all(below is None or below in made or i in shared for i, below in enumerate(beneath))
