"""Who owns which element: asked of the engine, not assumed.

The gradient at an element is linear in the losses it comes from. The engine is run several times, each time with
the losses of other samples left out (a weight of zero). In which runs an element is not zero tells its owner:

    sample    0  1  2  3  4  5
    run 0     x  x  x
    run 1     x        x  x
    run 2        x     x     x
    run 3           x     x  x

Every sample takes part in half of the runs, no two in the same ones. An element that two samples share is not zero
in more runs than that, however small the part of one of them is: there is a run without the other.
The losses that take part have random weights, so that the parts of equal samples do not cancel.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import combinations, islice
from math import comb, prod

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..engine import Gradients, Losses
from ..layout.samples import SampleLayout, fitting_blocks

# To ask about an op takes holding its gradient. More than this many bytes are asked for in several runs of the
# engine, but not in many.
_HELD_BYTES = 1 << 26
_GROUPS_AT_MOST = 4
# What stands in the place of an owner: nothing to own, owned by several.
_ZERO, _SHARED = -1, -2
# Gradients are compared this many elements at a time, so that comparing takes little memory.
_AT_A_TIME = 1 << 16


def probe(losses: Losses, nodes: Iterable[Node]) -> dict[Node, tuple[SampleLayout, ...] | None]:
    """Observe who owns the outputs of some ops, a few ops at a time where their gradients are large.

    Args:
        losses: what is differentiated.
        nodes: the ops.

    Returns:
        For each op one layout per output; None where samples share elements.
    """
    found: dict[Node, tuple[SampleLayout, ...] | None] = {}
    for few in _in_groups(nodes):
        found |= {node: tuple(SampleLayout.empty(losses.samples) for _ in graph.describe(node)) for node in few}
        found |= _probe(losses, few)
    return found


def _in_groups(nodes: Iterable[Node]) -> Iterator[list[Node]]:
    sizes = {node: sum(4 * prod(out.shape) for out in graph.describe(node)) for node in nodes}
    limit = max(_HELD_BYTES, sum(sizes.values()) / _GROUPS_AT_MOST)
    group: list[Node] = []
    held = 0
    for node, size in sizes.items():
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(node)
        held += size
    if group:
        yield group


def _probe(losses: Losses, nodes: Iterable[Node]) -> dict[Node, tuple[SampleLayout, ...] | None]:
    """Return the layouts of those ops that get a gradient."""
    root, samples = losses.root, losses.samples
    generator = torch.Generator().manual_seed(20)
    # At least 1, so that nothing vanishes that the losses themselves show; little more, so that nothing overflows.
    base = (1 + torch.rand(samples, generator=generator, dtype=torch.float64) / 4).to(root)
    codes = _Codes(samples, root.device)
    marks: dict[Node, list[Tensor | None]] = {}
    shared: dict[Node, None] = {}
    asked = list(nodes)
    for run, takes_part in enumerate(codes.takes_part):
        mark = partial(_mark, marks, run, len(codes.takes_part))
        losses.visit(asked, base * takes_part, mark)
        found = [node for node in asked if node in marks and codes.tell_shared(marks[node], run)]
        shared |= dict.fromkeys(found)  # to know that takes no more runs
        asked = [node for node in asked if node not in shared]
        if not asked:
            break
    return {node: None if node in shared else _layouts(found, codes, samples) for node, found in marks.items()}


class _Codes:
    """In which runs each sample takes part: in half of them, and no two samples in the same half.

    Attributes:
        takes_part: for each run, whether each sample takes part.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        runs = next(n for n in range(2, 64) if comb(n, n // 2) >= samples)
        self._half = runs // 2
        codes = torch.tensor(list(islice(combinations(range(runs), self._half), samples))).view(-1, self._half)
        self.takes_part = torch.zeros(runs, samples, dtype=torch.bool)
        self.takes_part[codes.T, torch.arange(samples)] = True
        self.takes_part = self.takes_part.to(device)
        owner = torch.full((1 << runs,), _SHARED, dtype=torch.int32)
        owner[(1 << codes).sum(1)] = torch.arange(samples, dtype=torch.int32)
        owner[0] = _ZERO
        self._owner = owner.to(device)
        count = torch.stack([torch.arange(1 << runs) >> run & 1 for run in range(runs)]).sum(0)
        self._crowded = (count > self._half).to(device)

    def owners(self, marks: Tensor) -> Tensor:
        """Return the owner of each element, given its marks; nobody where it was not finite."""
        return torch.where(marks & 1 == 1, _ZERO, self._owner[(marks >> 1).int()])

    def tell_shared(self, found: list[Tensor | None], run: int) -> bool:
        """Return whether some element is known to be shared when these runs are over."""
        if run != self._half:  # no run before that could tell, and those after it would tell little more
            return False
        return any(
            bool((self._crowded[(marks >> 1).int()] & (marks & 1 == 0)).any()) for marks in found if marks is not None
        )


def _mark(marks: dict[Node, list[Tensor | None]], run: int, runs: int, node: Node, gradients: Gradients) -> None:
    """Note in one bit of each element that it is not zero in this run; in the lowest, that it is not finite."""
    found = marks.setdefault(node, [None] * len(gradients))
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
        before = found[i]
        if before is None:
            small = torch.int16 if runs < 15 else torch.int32
            before = found[i] = torch.zeros(flat.numel(), dtype=small, device=flat.device)
        finite = bool(torch.isfinite(flat.sum()))
        for start in range(0, flat.numel(), _AT_A_TIME):
            here, old = flat[start : start + _AT_A_TIME], before[start : start + _AT_A_TIME]
            old.add_(here != 0, alpha=2 << run)
            if not finite:
                old |= ~torch.isfinite(here)


def _owned(owners: Tensor, blocks: list[int], samples: int) -> SampleLayout:
    if blocks:
        return SampleLayout(samples, blocks[0], None, owners if bool((owners == _ZERO).any()) else None)
    return SampleLayout(samples, None, owners.long())


def _layouts(found: list[Tensor | None], codes: _Codes, samples: int) -> tuple[SampleLayout, ...] | None:
    layouts = [_layout(marks, codes, samples) for marks in found]
    return None if None in layouts else tuple(layout for layout in layouts if layout is not None)


def _layout(marks: Tensor | None, codes: _Codes, samples: int) -> SampleLayout | None:
    if marks is None:
        return SampleLayout.empty(samples)
    owners = codes.owners(marks)
    if bool((owners == _SHARED).any()):
        return None
    blocks = fitting_blocks(owners, samples)
    if len(blocks) != 1 and bool((marks & 1 == 1).any()):
        return None  # nobody can tell whose the NaNs are, so nobody owns them
    return _owned(owners, blocks, samples)
