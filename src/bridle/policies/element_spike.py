import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._devices import accumulation_dtype
from .._measure import magnitudes
from .._torch.dtensor import local_tensor, spec_of, spread
from .._validate import count, decay_below_one, floor_and_ceiling, number
from ..errors import ArgumentError, UnsupportedGradientError
from .base import Clamp, GradientView
from .built_once import BuiltOnce
from .state import check_complete


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
        # By key: the root of the moving average of squares, for every element, and how many steps it has seen.
        self._rms: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}
        self._specs: dict[str, Any] = {}  # how it is spread over ranks

    def check(self, grads: GradientView) -> None:
        """Refuse gradients whose elements cannot be told apart, or have the history of another parameter."""
        super().check(grads)
        grads.refuse_plain_shards("ByElementSpike")
        for key, g, w in zip(grads.keys(), grads.values, grads.weights(), strict=True):
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"ByElementSpike remembers every element, and the gradient {key!r} is {g.layout}. Give that "
                    "parameter another policy by a name pattern, or use a dense gradient."
                )
            rms = self._rms.get(key)
            if rms is not None and rms.shape != w.shape:
                raise ArgumentError(
                    f"the history of {key!r} has shape {tuple(rms.shape)} and its gradient {tuple(w.shape)}: one "
                    "policy was used for two models, or loaded from another one. Make a policy for each."
                )

    def decide(self, grads: GradientView) -> Clamp:
        """Limit each element by its own history, and learn from it."""
        with torch.no_grad():
            finite = torch.isfinite(grads.norms(self.p)).unbind()
            self._specs.update(zip(grads.keys(), map(spec_of, grads.parameters), strict=True))
            rows = zip(grads.keys(), grads.values, grads.weights(), finite, strict=True)
            return Clamp([self._limit(key, g.detach(), w.shape, good.to(g.device)) for key, g, w, good in rows])

    def _limit(self, key: str, g: Tensor, shape: torch.Size, good: Tensor) -> Tensor:
        if g.shape != shape:  # this rank lacks a gradient that others have
            return torch.full_like(magnitudes(g), math.inf)
        size, rms, seen = self._read(key, g)
        unbiased = rms / (1 - self.decay**seen).sqrt()  # corrected for the start at zero
        known = (rms > 0) & (seen >= self.warmup)  # an element that never had a gradient has no history
        limit = torch.where(known, (math.sqrt(self.theta) * unbiased).clamp(self.floor, self.ceiling), self.ceiling)
        clipped = torch.minimum(size, limit)
        after = torch.hypot(math.sqrt(self.decay) * rms, math.sqrt(1 - self.decay) * clipped)
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
        """Return what it has learned. It loads with `torch.load(..., weights_only=True)`.

        Of sharded parameters it is sharded as they are.
        """
        rms = {key: spread(t.clone(), self._specs.get(key)) for key, t in self._rms.items()}
        return self._saved(rms=rms, seen={key: t.clone() for key, t in self._seen.items()}, keys=list(rms))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._check_saved(saved)
        check_complete(saved.get("keys", saved["rms"]), saved["rms"])
        self._specs = {key: spec_of(t) for key, t in saved["rms"].items()}
        self._rms = {key: local_tensor(t).clone() for key, t in saved["rms"].items()}
        self._seen = {key: t.clone() for key, t in saved["seen"].items()}
