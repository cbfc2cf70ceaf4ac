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

from collections.abc import Iterable
from functools import partial
from itertools import combinations, islice
from math import comb

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..engine import Gradients, Losses
from ..layout.samples import SampleLayout, fitting_blocks

# What stands in the place of an owner: nothing to own, owned by several.
_ZERO, _SHARED = -1, -2
# Gradients are compared this many elements at a time, so that comparing takes little memory.
_AT_A_TIME = 1 << 16


def probe(losses: Losses, nodes: Iterable[Node]) -> dict[Node, tuple[SampleLayout, ...] | None]:
    """Observe who owns the outputs of some ops: one layout for each; None for an op of which samples share elements."""
    asked, root, samples = list(nodes), losses.root, losses.samples
    takes_part, owner_of_code = _codes(samples, root.device)
    generator = torch.Generator().manual_seed(20)
    # At least 1, so that nothing vanishes that the losses themselves show; little more, so that nothing overflows.
    base = (1 + torch.rand(samples, generator=generator, dtype=torch.float64) / 4).to(root)
    marks: dict[Node, list[Tensor | None]] = {node: [None] * len(graph.describe(node)) for node in asked}
    for run, here in enumerate(takes_part):
        losses.visit(asked, base * here, partial(_mark, marks, run, len(takes_part)))
    observed = {node: [_layout(one, owner_of_code, samples) for one in marks[node]] for node in asked}
    return {
        node: None if None in layouts else tuple(one for one in layouts if one is not None)
        for node, layouts in observed.items()
    }


def _codes(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Let each sample take part in half of the runs, and no two samples in the same half.

    Returns:
        For each run, whether each sample takes part; and the owner of an element, by the runs in which it is not zero.
    """
    runs = next(n for n in range(2, 64) if comb(n, n // 2) >= samples)
    codes = torch.tensor(list(islice(combinations(range(runs), runs // 2), samples))).view(-1, runs // 2)
    takes_part = torch.zeros(runs, samples, dtype=torch.bool)
    takes_part[codes.T, torch.arange(samples)] = True
    owner = torch.full((1 << runs,), _SHARED, dtype=torch.int32)
    owner[(1 << codes).sum(1)] = torch.arange(samples, dtype=torch.int32)
    owner[0] = _ZERO
    return takes_part.to(device), owner.to(device)


def _mark(marks: dict[Node, list[Tensor | None]], run: int, runs: int, node: Node, gradients: Gradients) -> None:
    """Note in one bit of each element that it is not zero in this run; in the lowest, that it is not finite."""
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        flat = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
        before = marks[node][i]
        if before is None:
            small = torch.int16 if runs < 15 else torch.int32
            before = marks[node][i] = torch.zeros(flat.numel(), dtype=small, device=flat.device)
        finite = bool(torch.isfinite(flat.sum()))
        for start in range(0, flat.numel(), _AT_A_TIME):
            here, old = flat[start : start + _AT_A_TIME], before[start : start + _AT_A_TIME]
            old.add_(here != 0, alpha=2 << run)
            if not finite:
                old |= ~torch.isfinite(here)


def _layout(marks: Tensor | None, owner_of_code: Tensor, samples: int) -> SampleLayout | None:
    if marks is None:
        return SampleLayout.empty(samples)
    infinite = marks & 1 == 1
    owners = torch.where(infinite, _ZERO, owner_of_code[(marks >> 1).int()])
    if bool((owners == _SHARED).any()):
        return None
    blocks = fitting_blocks(owners, samples)
    if len(blocks) != 1 and bool(infinite.any()):
        return None  # nobody can tell whose the NaNs are, so nobody owns them
    if blocks:
        return SampleLayout(samples, blocks[0], None, owners if bool((owners == _ZERO).any()) else None)
    return SampleLayout(samples, None, owners.long())
