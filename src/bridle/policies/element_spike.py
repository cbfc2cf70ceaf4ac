import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _devices
from .._measure import magnitudes
from .._validate import count, decay_below_one, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .base import Clamp, GradientView
from .built_once import BuiltOnce
from .element_memory import Chunk, ElementMemory, flatten
from .state import StateRows


@dataclass(eq=False)
class ByElementSpike(BuiltOnce):
    """Limit each element by its own second moment: `g² > theta v` becomes `g = sign(g) sqrt(theta v)`.

    v is the moving average of the square of that element after clipping, corrected for its start at zero. For complex
    elements, magnitudes are clipped and phases preserved. Costs one float32 of memory per element, as Adam's own
    second moment does; elements below about 1e-37 are remembered with few digits or none. Huang et al., SPAM (arXiv
    2501.06842), of which this is the clipping; its reset of the moments belongs to the optimizer. There v is not
    corrected, so early limits are tighter.

    Args:
        theta: How many times the average square is too large.
        decay: How much of the old average a step keeps.
        warmup: Steps to learn from before limiting; until then only `ceiling` holds.
        floor: An element below this is never changed.
        ceiling: An element above this always is.

    Example:
        >>> policy = bridle.policies.ByElementSpike(theta=25.0, warmup=2)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> for size in (1.0, 1.0, 1000.0):
        ...     weight.grad = torch.tensor([size, 1.0])
        ...     report = bridle.clip_([weight], policy)
        >>> weight.grad
        tensor([5.0000, 1.0000])
    """

    p: ClassVar[float] = 2.0

    theta: float = 5000.0
    decay: float = 0.999
    _: KW_ONLY
    warmup: int = 10
    floor: float = 0.0
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        """Validate the arguments."""
        self.theta, self.decay = number(self.theta, "theta"), decay_below_one(self.decay, "decay")
        self.warmup = count(self.warmup, "warmup", 0)
        self.floor, self.ceiling = floor_and_ceiling(self.floor, self.ceiling)
        self._rms = ElementMemory()  # the root of the moving average of squares
        self._seen = StateRows({})  # how many steps each parameter has learned from

    def check(self, grads: GradientView) -> None:
        """Refuse gradients whose elements cannot be told apart, or have the history of another parameter."""
        super().check(grads)
        grads.refuse_sharded("ByElementSpike")
        self._plan(grads)

    def _plan(self, grads: GradientView) -> list[Chunk]:
        return self._rms.plan(grads, grads.tensors, _refuse_sparse)

    def decide(self, grads: GradientView) -> Clamp:
        """Limit each element by its own history, and learn from it."""
        with torch.no_grad():
            keys, norms = grads.keys(), grads.norms(self.p)
            seen, good = self._seen.read(keys, norms)["seen"], torch.isfinite(norms)
            # Corrected for the start at zero; infinite before there is a history.
            times = torch.where(seen < self.warmup, math.inf, math.sqrt(self.theta) / (1 - self.decay**seen).sqrt())
            bad = good.logical_not()
            known_good = _devices.readable_now(grads.tensors) and not bool(bad.any())
            limits: list[Tensor | None] = [None] * len(keys)
            for chunk in self._plan(grads):
                found = self._limit(chunk, chunk.of(grads.tensors), times, None if known_good else bad)
                for i, limit in zip(chunk.where, found, strict=False):
                    limits[i] = limit
            self._seen.write(keys, {"seen": seen + good})
            return Clamp(limits)

    def _limit(self, chunk: Chunk, grads: list[Tensor], times: Tensor, bad: Tensor | None) -> list[Tensor]:
        """Return the limits of some gradients; nothing where none is exceeded. Learn from those that are not bad."""
        size = _sizes(grads)
        rms = self._rms.read(chunk.keys, grads, torch.zeros_like(size))
        times = chunk.spread(times.to(size.dtype), size.device)
        limit = torch.where(rms > 0, (times * rms).clamp_(self.floor, self.ceiling), self.ceiling)
        clipped = torch.minimum(size, limit)
        after = torch.hypot(math.sqrt(self.decay) * rms, math.sqrt(1 - self.decay) * clipped)
        after.clamp_(max=torch.finfo(after.dtype).max)
        if bad is not None:
            bad = chunk.spread(bad, size.device)
            limit, after = torch.where(bad, math.inf, limit), torch.where(bad, rms, after)
        self._rms.write(chunk.keys, after)
        if bad is None and torch.equal(clipped, size):
            return []
        return [t.view(g.shape) for t, g in zip(limit.split_with_sizes(chunk.sizes.tolist()), grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned. It loads with `torch.load(..., weights_only=True)`."""
        return self._saved(rms=self._rms.state_dict(), seen=self._seen.state_dict())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._check_saved(saved)
        self._seen.load_state_dict(saved["seen"])
        self._rms.load_state_dict(saved["rms"])


def _refuse_sparse(grads: GradientView) -> None:
    for key, g in zip(grads.keys(), grads.tensors, strict=True):
        if g.layout is not torch.strided:
            raise UnsupportedGradientError(
                f"ByElementSpike remembers every element, and the gradient {key!r} is {g.layout}. Give that "
                "parameter another policy by a name pattern, or use a dense gradient."
            )


def _sizes(grads: list[Tensor]) -> Tensor:
    """Return the magnitude of every element, end to end, as float32 or wider."""
    size = magnitudes(flatten(grads))
    return size.float() if size.dtype in (torch.float16, torch.bfloat16) else size
