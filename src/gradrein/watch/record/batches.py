"""Which samples the batches with unusually large gradients or losses were made of, by the data loader's indices.

`_next_index` of a DataLoader's iterator asks the sampler, in this process also where workers load: it and `__next__`
are replaced while somebody observes, and the indices of a batch are those asked for first and not yet delivered. What
belongs to a step are the batches that were delivered last before its backward passes.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from numbers import Integral
from statistics import median
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from ..._torch.training import DataLoaderIterator, dataset_size
from ..format.schema import Line

_TIMES = 2.0  # so much above the running median, and the batch is kept
_WINDOW, _LEAST = 101, 20
_BUDGET = 50_000  # indices in a record

Batch: TypeAlias = tuple[list[int], int]
"""Indices, and out of how many samples they were drawn."""

# By iterator: out of how many samples, None where indices say nothing; and what is asked for and not delivered.
_asked: WeakKeyDictionary[DataLoaderIterator, tuple[int | None, deque[list[int]]]] = WeakKeyDictionary()


def remember_index(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_next_index`: keep what the sampler returns until its batch is delivered."""

    def _next_index(self: Any) -> Any:
        found = original(self)
        with contextlib.suppress(Exception):  # a script must not suffer from being observed
            if self not in _asked:
                _asked[self] = dataset_size(self), deque()
            size, queue = _asked[self]
            if size:
                queue.append(_rows(found))
        return found

    return _next_index


def forget_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_reset`: what was asked for in an epoch that was left is never delivered."""

    def _reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            _asked.pop(self, None)
        return original(self, *args, **kwargs)

    return _reset


def delivered(iterator: DataLoaderIterator) -> Batch | None:
    """Return the batch that was just delivered, or failed to be; None where its indices are not known."""
    with contextlib.suppress(Exception):
        size, queue = _asked.get(iterator, (None, None))
        rows = queue.popleft() if queue else []
        return (rows, size) if rows and size else None
    return None


def _rows(found: Any) -> list[int]:
    """Return the indices of a batch; none where a sampler gives something else. Nothing is consumed."""
    rows = found if isinstance(found, (list, tuple)) else [found]
    return [int(row) for row in rows] if all(isinstance(row, Integral) for row in rows) else []


class BatchTracker:
    """Keeps the indices of the batches of the coming step, and of the steps that stand out."""

    def __init__(self) -> None:
        self._last: Batch | None = None
        self._used: list[Batch] = []
        self._is_new = False
        self._usual: dict[tuple[int, str], deque[float]] = {}
        self._written = 0

    def on_batch(self, batch: Batch | None) -> None:
        """Take a batch that was delivered; None where its indices are not known."""
        self._last = batch

    def on_backward(self) -> None:
        """Add the batch that was delivered last to those of the coming step."""
        if not self._is_new:
            self._used, self._is_new = [], True
        if self._last is not None and self._last not in self._used[-1:]:
            self._used.append(self._last)

    def end_step(self) -> list[Batch]:
        """Return the batches of the step, and start over with the next backward pass.

        Another optimizer may still take its step on the same batches.
        """
        self._is_new = False
        return self._used

    def line(self, batches: list[Batch], step: Line) -> Line | None:
        """Return the line for the batches of a step that stands out among those before by norm or loss; else None."""
        opt = step["opt"]
        known = {name: step[name] for name in ("norm", "loss") if isinstance(step[name], float)}
        large = [self._is_large(opt, name, v) for name, v in known.items()]
        rows = [row for batch, _ in batches for row in batch]
        sizes = {size for _, size in batches}
        if not any(large) or len(sizes) != 1 or self._written + len(rows) > _BUDGET:
            return None
        self._written += len(rows)
        return {"batch": rows, "dataset": sizes.pop(), "opt": opt, "after": step["step"]}

    def _is_large(self, opt: int, name: str, value: float) -> bool:
        before = self._usual.setdefault((opt, name), deque(maxlen=_WINDOW))
        usual = median(before) if len(before) >= _LEAST else math.inf
        before.append(value)
        return value > _TIMES * usual > 0
