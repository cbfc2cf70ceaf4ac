"""Who owns which element: observed by running the engine, not assumed.

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

from ..._torch.nodes import output_shapes
from ...errors import UnsupportedOperationError
from ..engine import Gradients, Losses
from ..layout import MIXED, UNREACHED, Owners, fitting_blocks

# Gradients are compared this many elements at a time, so that comparing takes little memory.
_AT_A_TIME = 1 << 16


def observe(losses: Losses, nodes: Iterable[Node]) -> dict[Node, tuple[Owners, ...] | None]:
    """Observe who owns the outputs of some ops; None for an op of which samples share elements.

    Raises:
        UnsupportedOperationError: there are hooks.
    """
    nodes, root, samples = list(nodes), losses.root, losses.samples
    if nodes and losses.has_hooks:
        raise UnsupportedOperationError(
            "per_sample: a hook is registered on a value, an op, an input or a parameter that the losses depend on, "
            "and the structure of the graph does not show whether samples are kept apart. The engine would have to run "
            "to find out, and would give the hook gradients that are not those of the losses. Remove the hook, or pass "
            "all parameters and inputs that need no gradient; or pass allow_coupling=True."
        )
    takes_part, owner_of_code = _codes(samples, root.device)
    generator = torch.Generator().manual_seed(20)
    # At least 1, so that nothing vanishes that the losses themselves show; little more, so that nothing overflows.
    base = (1 + torch.rand(samples, generator=generator, dtype=torch.float64) / 4).to(root)
    shapes = output_shapes(nodes)
    marks: dict[Node, list[Tensor | None]] = {node: [None] * len(shapes[node]) for node in nodes}
    for run, here in enumerate(takes_part):
        losses.show(nodes, base * here, partial(_mark, marks, run, len(takes_part)))
    observed: dict[Node, tuple[Owners, ...] | None] = {}
    for node in nodes:
        each = [_owners(*one, owner_of_code, samples) for one in zip(marks[node], shapes[node], strict=True)]
        known = tuple(one for one in each if one is not None)
        observed[node] = known if len(known) == len(each) else None
    return observed


def _codes(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Let each sample take part in half of the runs, and no two samples in the same half.

    Returns:
        For each run, whether each sample takes part; and the owner of an element, by the runs in which it is not zero.
    """
    runs = next(n for n in range(2, 64) if comb(n, n // 2) >= samples)
    codes = torch.tensor(list(islice(combinations(range(runs), runs // 2), samples))).view(-1, runs // 2)
    takes_part = torch.zeros(runs, samples, dtype=torch.bool)
    takes_part[codes.T, torch.arange(samples)] = True
    owner = torch.full((1 << runs,), MIXED, dtype=torch.int32)
    owner[(1 << codes).sum(1)] = torch.arange(samples, dtype=torch.int32)
    owner[0] = UNREACHED
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


def _owners(marks: Tensor | None, shape: tuple[int, ...], owner_of_code: Tensor, samples: int) -> Owners | None:
    if marks is None:
        return Owners.all(UNREACHED, shape)
    infinite = marks & 1 == 1
    ids = torch.where(infinite, UNREACHED, owner_of_code[(marks >> 1).int()])
    if bool((ids == MIXED).any()):
        return None
    if bool(infinite.any()):
        blocks = fitting_blocks(ids, samples)
        if len(blocks) != 1:
            return None  # nobody can tell whose the NaNs are, so nobody owns them
        claimed = torch.arange(len(ids), device=ids.device).div(blocks[0], rounding_mode="floor") % samples
        ids = torch.where(infinite, claimed.int(), ids)
    return Owners.of(ids.to("cpu").reshape(shape), shape)
