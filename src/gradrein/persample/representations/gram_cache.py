"""Gram matrices of the rows of each sample, shared by the parameters that need the same one."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor

from ..._torch.storage import storage_of
from .numerics import HALF_TYPES

# Matrices larger than this are made again rather than kept.
_KEPT_BYTES = 1 << 25


def strip_of(rows: int) -> int:
    """Return how many rows to take at a time: few, to skip most of the upper half, yet enough for a fast product."""
    return min(max(32, rows // 8), 128)


class GramCache:
    """Gram matrices, each kept while another parameter is still to ask for it.

    Queries, keys and values see one input; the two weights of a recurrent layer see one gradient at its gates.
    """

    def __init__(self, factors: Iterable[Tensor] = ()) -> None:
        self._to_come = Counter(_identity(x) for x in factors)
        self._kept: dict[tuple[object, ...], list[Tensor]] = {}

    def strips(self, x: Tensor) -> Iterable[Tensor]:
        """Return ``x @ x.T`` of each sample in strips of rows, each without what lies right of the diagonal."""
        key = _identity(x)
        found = self._kept.pop(key, None)
        self._to_come[key] -= 1
        if self._to_come[key] <= 0 or x.shape[0] * x.shape[1] ** 2 * x.element_size() > _KEPT_BYTES:
            return _strips(x) if found is None else found
        self._kept[key] = list(_strips(x)) if found is None else found
        return self._kept[key]


def _strips(x: Tensor) -> Iterator[Tensor]:
    x = x.float() if x.dtype in HALF_TYPES else x
    step = strip_of(x.shape[1])
    for start in range(0, x.shape[1], step):
        end = min(start + step, x.shape[1])
        yield x[:, start:end] @ x[:, :end].transpose(1, 2)


def _identity(x: Tensor) -> tuple[object, ...]:
    """Return what tells tensors apart that are alive at one time; two nodes save one value as two tensors."""
    return storage_of(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x.device
