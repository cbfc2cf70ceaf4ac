"""Who owns which element: asked of the engine, not assumed.

The gradient at an element is linear in the losses it comes from. Weigh the losses, then weigh them again with
sample i's weight multiplied by a power of two of its own. An element that belongs to one sample is multiplied
by exactly that power (such a multiplication commutes with every rounding); an element that several samples
share is not. The first weights are random, so that equal samples cannot conspire to look like one.
"""

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil, log
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import graph
from ._owners import Layout, fitting_blocks
from ._pieces import wide

# Is shown an op and the gradients at its outputs.
Gradients: TypeAlias = tuple[Tensor | None, ...]
See: TypeAlias = Callable[[Node, Gradients], None]
# Runs the engine, given one weight per sample, and shows the gradients at some ops.
Visit: TypeAlias = Callable[[Iterable[Node], Tensor, See], None]
# Is shown an op, its gradients under the first weights, and the owners of their elements.
_Done: TypeAlias = Callable[[Node, Gradients, list[Tensor | None]], None]

# What stands in the place of an owner: nothing to own, too small to be told whose, owned by several.
_ZERO, _LOST, _SHARED = -1, -2, -3
# Gradients are compared this many elements at a time, so that comparing takes little room.
_AT_A_TIME = 1 << 16


def probe(visit: Visit, nodes: Iterable[Node], samples: int, root: Tensor) -> dict[Node, tuple[Layout, ...] | None]:
    """Find who owns what at the outputs of some ops.

    Args:
        visit: runs the engine.
        nodes: the ops.
        samples: how many samples there are.
        root: the losses.

    Returns:
        For each op that gets a gradient, one layout per output; None where samples share elements.
    """
    generator = torch.Generator().manual_seed(20)
    base = (1 + torch.rand(samples, generator=generator, dtype=torch.float64)).to(root)
    # Half precision has few exponents: spread the number over more calls.
    half = any(out.dtype == torch.float16 for node in graph.reachable([root]) for out in graph.describe(node))
    levels, lift = (8, 11) if half else (32, 64)
    answers: dict[Node, tuple[Layout, ...] | None] = {}
    missed: dict[Node, tuple[Gradients, list[Tensor | None]]] = {}

    def done(node: Node, first: Gradients, found: list[Tensor | None]) -> None:
        if any(owners is not None and bool((owners == _LOST).any()) for owners in found):
            missed[node] = first, found
        else:
            answers[node] = _layouts(first, found, samples)

    def done_larger(node: Node, _: Gradients, larger: list[Tensor | None]) -> None:
        first, found = missed.pop(node)
        both = [
            torch.where((a == _LOST) & (b != _ZERO), b, a) if a is not None and b is not None else a
            for a, b in zip(found, larger, strict=True)
        ]
        answers[node] = _layouts(first, both, samples)

    _ask(visit, nodes, base, levels, done)
    if missed:  # too small to be told apart: ask again with everything larger, also by a power of two
        _ask(visit, list(missed), torch.ldexp(base, torch.tensor(lift)), levels, done_larger)
    return answers


def _ask(visit: Visit, nodes: Iterable[Node], base: Tensor, levels: int, done: _Done) -> None:
    """Find the owner of each element, digit by digit.

    An op is done with as soon as it was seen for the last time, so that little is held at once.
    """
    samples = len(base)
    digits = max(1, ceil(log(max(samples, 2)) / log(levels) - 1e-9))
    small = torch.int16 if levels**digits <= 1 << 15 else torch.int32
    number = torch.arange(samples, device=base.device)
    first: dict[Node, Gradients] = {}
    found: dict[Node, list[Tensor | None]] = {}

    def keep(node: Node, gradients: Gradients) -> None:
        first[node] = tuple(None if g is None else g.detach() for g in gradients)

    def compare(digit: int, node: Node, gradients: Gradients) -> None:
        if node not in found:
            found[node] = [
                None if g is None else torch.zeros(g.numel(), dtype=small, device=g.device) for g in first[node]
            ]
        for a, b, owners in zip(first[node], gradients, found[node], strict=True):
            if a is not None and b is not None and owners is not None:
                _add_digit(owners, a, b.detach(), levels, digit)
        if digit == digits - 1:
            done(node, first.pop(node), found.pop(node))

    visit(nodes, base, keep)
    for digit in range(digits):
        exponent = number.div(levels**digit, rounding_mode="floor") % levels
        visit(nodes, torch.ldexp(base, exponent - levels // 2), partial(compare, digit))


def _add_digit(owners: Tensor, a: Tensor, b: Tensor, levels: int, digit: int) -> None:
    """Write one more digit of each element's owner, in place."""
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), _AT_A_TIME):
        cut = slice(start, start + _AT_A_TIME)
        before, seen = owners[cut], _exponents(a[cut], b[cut], levels).to(owners.dtype)
        worst = torch.minimum(before, seen)
        owners[cut] = torch.where(worst < 0, worst, before + seen * levels**digit)


def _exponents(a: Tensor, b: Tensor, levels: int) -> Tensor:
    """Return for each element which power of two it was multiplied by, counted from 0."""
    # Below this a product may have lost digits to underflow.
    tiny = torch.finfo(a.dtype).tiny * 2 ** (4 if a.dtype == torch.float16 else 26)
    a, b = wide(a), wide(b)
    size = a.abs()
    seen = (size > tiny) & (size < torch.inf)
    fraction_a, exponent_a = torch.frexp(a)
    fraction_b, exponent_b = torch.frexp(b)
    exponent = (exponent_b - exponent_a + levels // 2).clamp_(-1, levels)
    exact = ((fraction_a - fraction_b).abs() < 1e-5) & (exponent >= 0) & (exponent < levels)
    exponent.masked_fill_(~exact, _SHARED).masked_fill_(~seen, _ZERO)
    return exponent.masked_fill_((size > 0) & (size <= tiny), _LOST)


def _layouts(first: Gradients, found: list[Tensor | None], samples: int) -> tuple[Layout, ...] | None:
    layouts = [_layout(a, owners, samples) for a, owners in zip(first, found, strict=True)]
    return None if None in layouts else tuple(layout for layout in layouts if layout is not None)


def _layout(gradient: Tensor | None, owners: Tensor | None, samples: int) -> Layout | None:
    if gradient is None or owners is None:
        return Layout.of_nobody(samples)
    worst = int(owners.min()) if owners.numel() else _ZERO
    if worst == _SHARED or bool((owners >= samples).any()):
        return None
    blocks = fitting_blocks(owners, samples)
    certain = len(blocks) == 1
    if not certain and gradient.numel() and not bool(torch.isfinite(gradient.sum())):
        return None  # nobody can tell whose the NaNs are, so nobody owns them
    # In half precision little is lost all the time; there all that was seen must allow no other answer.
    if worst == _LOST and not (certain and gradient.dtype == torch.float16):
        return None
    if blocks:
        return Layout(samples, blocks[0], None, certain)
    return Layout(samples, None, owners.long(), certain=False)
