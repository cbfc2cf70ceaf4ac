import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._devices import accumulation_dtype
from .._measure import magnitudes
from .._validate import count, decay_below_one, floor_and_ceiling, number
from ..errors import ArgumentError, UnsupportedGradientError
from .base import Clamp, GradientView
from .built_once import BuiltOnce


@dataclass(eq=False)
class ByElementSpike(BuiltOnce):
    """Limit each element by its own second moment: `g² > theta v` becomes `g = sign(g) sqrt(theta v)`.

    v is the moving average of the square of that element after clipping, corrected for its start at zero. For complex
    elements, magnitudes are clipped and phases preserved. Costs one float32 of memory per element, as Adam's own
    second moment does. The root of v is what is remembered, so an element is remembered with as many digits as its
    type has at its size. Huang et al., SPAM (arXiv 2501.06842), of which this is the clipping; its reset of the moments
    belongs to the optimizer. There v is not corrected, so early limits are tighter.

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
        tensor([5., 1.])
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
        # By key: for every element the root of the moving average of squares, corrected for its start at zero (so that
        # it is as large as the element, however slow the average), and how many steps it has seen.
        self._rms: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    def check(self, grads: GradientView) -> None:
        """Refuse gradients whose elements cannot be told apart, or have the history of another parameter."""
        super().check(grads)
        grads.refuse_sharded("ByElementSpike")
        for key, g in zip(grads.keys(), grads.tensors, strict=True):
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"ByElementSpike remembers every element, and the gradient {key!r} is {g.layout}. Give that "
                    "parameter another policy by a name pattern, or use a dense gradient."
                )
            rms = self._rms.get(key)
            if rms is not None and rms.shape != g.shape:
                raise ArgumentError(
                    f"the history of {key!r} has shape {tuple(rms.shape)} and its gradient {tuple(g.shape)}: one "
                    "policy was used for two models, or loaded from another one. Make a policy for each."
                )

    def decide(self, grads: GradientView) -> Clamp:
        """Limit each element by its own history, and learn from it."""
        with torch.no_grad():
            finite = torch.isfinite(grads.norms(self.p)).unbind()
            rows = zip(grads.keys(), grads.tensors, finite, strict=True)
            return Clamp([self._limit(key, g.detach(), good.to(g.device)) for key, g, good in rows])

    def _limit(self, key: str, g: Tensor, good: Tensor) -> Tensor:
        size, rms, seen = self._read(key, g)
        known = (rms > 0) & (seen >= self.warmup)  # an element that never had a gradient has no history
        limit = torch.where(known, (math.sqrt(self.theta) * rms).clamp(self.floor, self.ceiling), self.ceiling)
        clipped = torch.minimum(size, limit)
        weight = 1 - self.decay ** (seen + 1)  # of all steps so far, relative to the first
        old, new = self.decay * (1 - self.decay**seen) / weight, (1 - self.decay) / weight
        after = torch.hypot(old.sqrt().to(rms) * rms, new.sqrt().to(rms) * clipped)
        self._rms[key] = torch.where(good & torch.isfinite(after), after, rms)
        self._seen[key] = seen + good
        return torch.where(good, limit, math.inf)

    def _read(self, key: str, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = magnitudes(g)
        if size.dtype in (torch.float16, torch.bfloat16):
            size = size.float()
        dtype = accumulation_dtype(size.device)
        if key not in self._rms:
            self._rms[key] = torch.zeros_like(size, memory_format=torch.contiguous_format)
            self._seen[key] = torch.zeros((), dtype=dtype, device=size.device)
        return size, self._rms[key].to(size), self._seen[key].to(device=size.device, dtype=dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned. It loads with `torch.load(..., weights_only=True)`."""
        rows = {"corrected_rms": self._rms, "seen": self._seen}
        return self._saved(**{name: {k: t.clone() for k, t in each.items()} for name, each in rows.items()})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state of another policy, or of one with other settings.
        """
        self._check_saved(saved)
        rms, seen = saved.get("corrected_rms"), saved.get("seen")
        if not isinstance(rms, Mapping) or not isinstance(seen, Mapping) or rms.keys() != seen.keys():
            raise ArgumentError(
                "the saved state has no `corrected_rms` and `seen` for each parameter: it is damaged, or of another "
                "version. Load what `state_dict()` of a ByElementSpike returned."
            )
        self._rms = {key: t.clone() for key, t in rms.items()}
        self._seen = {key: t.clone() for key, t in seen.items()}
