"""Who owns which element: asked of the engine, not assumed.

The gradient at an element is linear in the losses it comes from. Weigh the losses, then weigh them again with
sample i's weight multiplied by a power of two of its own. An element that belongs to one sample is multiplied
by exactly that power (such a multiplication commutes with every rounding); an element that several samples
share is not. The first weights are random, so that equal samples cannot conspire to look like one.
"""

from collections.abc import Sequence
from math import ceil, log

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import graph
from . import _torch
from ._owners import Layout
from ._pieces import wide


def probe(root: Tensor, sample_of: Tensor, samples: int, edges: Sequence[GradientEdge]) -> list[Layout | None]:
    """Find who owns what at each edge.

    Args:
        root: one loss per entry.
        sample_of: which sample each entry of `root` counts for.
        samples: how many samples there are.
        edges: where to look.

    Returns:
        One layout per edge; None where samples share elements.
    """
    generator = torch.Generator().manual_seed(20)
    base = (1 + torch.rand(samples, generator=generator, dtype=torch.float64)).to(root)
    # Half precision has few exponents: spread the number over more calls.
    half = any(out.dtype == torch.float16 for node in graph.reachable([root]) for out in graph.describe(node))
    levels, lift = (8, 11) if half else (32, 64)
    first, found = _owners(root, base, sample_of, edges, levels)
    missed = {i: owners for i, owners in enumerate(found) if owners is not None and bool((owners == _LOST).any())}
    if missed:  # too small to be told apart: ask again with everything larger, also by a power of two
        lifted = torch.ldexp(base, torch.tensor(lift))
        _, again = _owners(root, lifted, sample_of, [edges[i] for i in missed], levels)
        for (i, owners), larger in zip(missed.items(), again, strict=True):
            if larger is not None:
                found[i] = torch.where((owners == _LOST) & (larger != _ZERO), larger, owners)
    return [_layout(a, owners, samples) for a, owners in zip(first, found, strict=True)]


# What stands in the place of an owner: nothing to own, too small to be told whose, owned by several.
_ZERO, _LOST, _SHARED = -1, -2, -3


def _owners(
    root: Tensor, base: Tensor, sample_of: Tensor, edges: Sequence[GradientEdge], levels: int
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Return the gradients under the weights `base`, and the owner of each of their elements."""
    samples = len(base)
    digits = max(1, ceil(log(max(samples, 2)) / log(levels) - 1e-9))
    first = _torch.gradients_at(root, base[sample_of], edges)
    number = torch.arange(samples, device=root.device)
    found: list[Tensor | None] = [None] * len(edges)
    for digit in range(digits):
        exponent = number.div(levels**digit, rounding_mode="floor") % levels
        scale = torch.ldexp(base, exponent - levels // 2)
        second = _torch.gradients_at(root, scale[sample_of], edges)
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            if a is not None and b is not None:
                seen = _exponents(a.detach(), b.detach(), levels)
                before = found[i]
                found[i] = seen if before is None else _join(before, seen, levels**digit)
    return first, found


def _exponents(a: Tensor, b: Tensor, levels: int) -> Tensor:
    """Return for each element which power of two it was multiplied by, counted from 0."""
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    # Below this a product may have lost digits to underflow.
    tiny = torch.finfo(a.dtype).tiny * 2 ** (4 if a.dtype == torch.float16 else 26)
    a, b = wide(a.reshape(-1)), wide(b.reshape(-1))
    size = a.abs()
    seen = (size > tiny) & (size < torch.inf)
    fraction_a, exponent_a = torch.frexp(a)
    fraction_b, exponent_b = torch.frexp(b)
    exponent = (exponent_b - exponent_a + levels // 2).long()
    exact = ((fraction_a - fraction_b).abs() < 1e-5) & (exponent >= 0) & (exponent < levels)
    exponent.masked_fill_(~exact, _SHARED).masked_fill_(~seen, _ZERO)
    return exponent.masked_fill_((size > 0) & (size <= tiny), _LOST)


def _join(before: Tensor, seen: Tensor, place: int) -> Tensor:
    joined = before + seen * place
    return torch.where((before < 0) | (seen < 0), torch.minimum(before, seen), joined)


def _layout(gradient: Tensor | None, owners: Tensor | None, samples: int) -> Layout | None:
    if gradient is None or owners is None:
        return Layout(samples, None, torch.empty(0, dtype=torch.long), certain=False)
    worst = int(owners.min()) if owners.numel() else _ZERO
    if worst == _SHARED or bool((owners >= samples).any()):
        return None
    blocks = _fitting_blocks(owners, samples)
    certain = len(blocks) == 1
    if not certain and gradient.numel() and not bool(torch.isfinite(gradient.sum())):
        return None  # nobody can tell whose the NaNs are, so nobody owns them
    # In half precision little is lost all the time; there all that was seen must allow no other answer.
    if worst == _LOST and not (certain and gradient.dtype == torch.float16):
        return None
    if blocks:
        return Layout(samples, blocks[0], None, certain)
    return Layout(samples, None, owners, certain=False)


def _fitting_blocks(owners: Tensor, samples: int) -> list[int]:
    """Return every block size under which the owners seen are right, the largest first."""
    if owners.numel() % samples:
        return []
    whole = owners.numel() // samples
    if samples == 1:
        return [whole]
    seen = (owners >= 0).nonzero().squeeze(1)
    owner = owners[seen]
    few = slice(None, None, max(1, len(seen) // 512))
    fitting = []
    for block in _divisors(whole):
        if bool((seen[few] // block % samples == owner[few]).all()) and bool((seen // block % samples == owner).all()):
            fitting.append(block)
    return fitting


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)
