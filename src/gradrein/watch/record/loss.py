"""Attribute losses to steps."""

from torch import Tensor

from ..._devices import accumulation_dtype


class LossTracker:
    """Adds up what backward was called on since the last step: that is what the gradient belongs to.

    Where two optimizers share a backward pass, the second is given the same loss.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0
        self._last: Tensor | None = None
        self._given_to: set[int] = set()

    def add(self, loss: Tensor) -> None:
        """Add a loss; nothing is read from the device yet."""
        wide = loss.to(accumulation_dtype(loss.device))
        self._sum, self._count = (wide if self._sum is None else self._sum + wide), self._count + 1

    def take(self, opt: int) -> tuple[Tensor | None, int]:
        """Return the loss of the step that optimizer `opt` is about to take, and of how many backward passes."""
        count = self._count
        if self._sum is not None:
            self._last = self._sum
            self._given_to.clear()
            self._sum, self._count = None, 0
        elif opt in self._given_to:
            return None, 0
        self._given_to.add(opt)
        return self._last, count

    def discard(self) -> bool:
        """Forget what was added since the last step; returns whether there was anything."""
        is_any = self._sum is not None
        self._sum, self._count = None, 0
        return is_any
