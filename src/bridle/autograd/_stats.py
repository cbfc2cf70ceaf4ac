"""What is measured of one gradient."""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stats:
    """Size and health of a gradient, or of several taken together.

    Attributes:
        norm: the 2-norm.
        size: how many values there are.
        zeros: how many of them are zero.
        nonfinite: how many of them are NaN or infinite.
    """

    norm: float
    size: int
    zeros: int
    nonfinite: int


def together(several: Iterable[Stats | None]) -> Stats | None:
    """Return the statistics of several gradients as if they were one; None if there is none."""
    found = [stats for stats in several if stats is not None]
    if len(found) <= 1:
        return found[0] if found else None
    return Stats(
        math.hypot(*(stats.norm for stats in found)),
        sum(stats.size for stats in found),
        sum(stats.zeros for stats in found),
        sum(stats.nonfinite for stats in found),
    )


def measure(gradient: Tensor) -> Stats | None:
    """Measure one gradient; None for kinds of tensor whose values are not all here, such as a DTensor."""
    values = plain_values(gradient.detach())
    if values is None:
        return None
    size = gradient.numel()
    if values.numel() == 0:
        return Stats(0.0, size, size, 0)
    zeros = size - _nonzero(values)
    reals = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    narrow = reals.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(reals, dtype=torch.float32 if narrow else None).item()
    nonfinite = 0
    if not 1e-15 < norm < 1e15:  # squares may have left the range of float32: look closer
        nonfinite = int(values.numel() - torch.isfinite(values).sum().item())
        norm = torch.linalg.vector_norm(reals, dtype=torch.float64).item()
    return Stats(norm, size, zeros, nonfinite)


def _nonzero(values: Tensor) -> int:
    """Count what is not zero.

    Flags are added eight at a time: in a sum of 128 words no byte can overflow. On CPU that takes a fifth of
    the time of `torch.count_nonzero`, which for large gradients would cost more than the norm.
    """
    if values.numel() < 8192:
        return int(torch.count_nonzero(values))
    flags = values.bool()
    flat = flags.as_strided((flags.numel(),), (1,))  # in the order of memory, which no one else has seen
    whole = flat.numel() // 1024 * 1024
    lanes = flat[:whole].view(torch.int64).view(128, -1).sum(0).view(torch.uint8)
    return int(lanes.sum() + flat[whole:].sum())


def plain_values(tensor: Tensor) -> Tensor | None:
    """Return the values a tensor holds as a plain one; None if they are not here, or of an unknown kind."""
    if tensor.is_nested:
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout != torch.strided:
        tensor = tensor.values() if tensor.layout in _COMPRESSED else tensor.to_dense()
    return tensor if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta else None


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Meter:
    """Measures gradients, each only once on its way from one node to the next."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Stats | None]] = {}

    def __call__(self, gradient: Tensor | None) -> Stats | None:
        """Return the statistics of a gradient; None for a gradient that is not there."""
        if gradient is None:
            return None
        known = self._known.get(id(gradient))
        # An id is only worth something while its object lives, and values while nobody wrote to them.
        if known is None or known[0]() is not gradient or known[1] != gradient._version:
            known = (weakref.ref(gradient), gradient._version, measure(gradient))
            self._known[id(gradient)] = known
        return known[2]

    def same(self, moved: Tensor, gradient: Tensor) -> None:
        """Take note that `moved` is a view of all of `gradient`."""
        self._known[id(moved)] = (weakref.ref(moved), moved._version, self(gradient))
