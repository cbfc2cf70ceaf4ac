import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _devices
from .._measure import magnitudes
from .._torch.ops import unflatten
from .._validate import count, decay_below_one, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .base import Clamp, GradientView
from .elements import ElementMemory, blocks, flatten, real_parts, together
from .state import LearningPolicy, StateRows, finite


@dataclass(eq=False)
class ByElementSpike(LearningPolicy):
    """Limit each element by its own second moment: `g² > theta v` becomes `g = sign(g) sqrt(theta v)`.

    v is the moving average of the square of that element after clipping, with bias correction. For complex
    elements, magnitudes are clipped and phases preserved. Costs one float32 of memory per element, as Adam's
    second moment does. The square root of v is stored, so that elements of every magnitude keep the precision of
    their dtype. This is the clipping of SPAM (Huang et al., arXiv 2501.06842); its reset of the moments
    belongs to the optimizer. SPAM does not correct the bias of v, so its early limits are tighter.

    Args:
        theta: An element is clipped if its square exceeds this many times the average.
        decay: The fraction of the old average that a step keeps.
        warmup: The number of steps to see before limiting; until then only `ceiling` applies.
        floor: An element below this is never changed.
        ceiling: An element above this is always limited.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByElementSpike(theta=25.0, warmup=2)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> for size in (1.0, 1.0, 1000.0):
        ...     weight.grad = torch.tensor([size, 1.0])
        ...     report = gradrein.clip_([weight], policy)
        >>> weight.grad
        tensor([5., 1.])

    See Also:
        [`gradrein.by_value`][], [`gradrein.policies.ByOvershoot`][]
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

    def _new_memory(self) -> dict[str, StateRows | ElementMemory]:
        # The root of the moving average of squares of each element, corrected for its start at zero: it is as large as
        # the element, however slow the average. And how many steps each parameter has learned from.
        return {"corrected_rms": ElementMemory(), "seen": StateRows()}

    def check(self, grads: GradientView) -> None:
        """Raise for gradients whose elements cannot be remembered."""
        grads.refuse_partial("ByElementSpike")
        for key, g in zip(grads.keys(), grads.values, strict=True):
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"ByElementSpike remembers every element, and the gradient {key!r} is {g.layout}. Give that "
                    "parameter another policy by a name pattern, or use a dense gradient."
                )
        self._memory["corrected_rms"].check(grads)

    def decide(self, grads: GradientView) -> Clamp:
        """Limit each element by its own history, and update the history."""
        with torch.no_grad():
            keys, norms, rows = grads.keys(), grads.norms(self.p), self._memory["seen"]
            seen, good = rows.read(keys, norms)["seen"], finite(norms) > 0
            settings = self._weights(seen, good)
            rows.write(keys, {"seen": seen + good})
            # Where they can be read, gradients with the same settings are handled as one.
            kinds = list(zip(*settings.tolist(), strict=True)) if _devices.readable_now([settings]) else None
            limits = list[Tensor | None]([None] * len(keys))
            for where in together(grads, kinds):
                own = [grads.values[i] for i in where]
                if kinds:
                    each = settings[:, where[0], None]
                else:
                    each = torch.cat([settings[:, i, None].expand(-1, grads.values[i].numel()) for i in where], 1)
                bounded = self._limits([keys[i] for i in where], own, each)
                for i, limit in zip(where, bounded or (), strict=bounded is not None):
                    limits[i] = limit
            return Clamp(limits)

    def _weights(self, seen: Tensor, good: Tensor) -> Tensor:
        """Return how many times its history an element may be, how much that and this step count, whether to learn."""
        # The weight of this step among all so far: 1 - decay over 1 - decay ** (seen + 1), without cancellation.
        rate = math.log(self.decay) if self.decay else -1e9  # far enough: its exponential is zero
        # Numbers over tensors in tensors of the CPU: one operation instead of two.
        share, most = torch.tensor([self.decay - 1, math.sqrt(self.theta)], dtype=seen.dtype, device="cpu").unbind()
        new = share / torch.expm1(torch.rsub(seen, rate, alpha=-rate))
        times = most / (good & (seen >= self.warmup))
        settings = torch.cat([times[None], 1 - new[None], new[None], good[None]])
        settings[1:3].clamp_(min=0).sqrt_()
        return settings

    def _limits(self, keys: list[str], grads: list[Tensor], settings: Tensor) -> list[Tensor] | None:
        """Return the limits of the elements of some gradients, None where all are below, and learn from them."""
        flat = flatten(grads)
        values = real_parts(magnitudes(flat)) if flat.is_complex() else real_parts(flat)
        memory: ElementMemory = self._memory["corrected_rms"]
        history = memory.read(keys, grads, values, zeros=True)
        limits, start = None, 0
        if _devices.readable_now([values]):
            if not settings[3]:
                return None
            times, of_old, of_new, _ = settings.flatten().tolist()
            for block, rms in blocks(values, history):
                size = block.abs()
                limit = self._limit(size, rms, times, of_old, of_new)
                if bool((size > limit).any()):  # mostly none is, and nothing is written
                    limits = torch.full_like(values, math.inf) if limits is None else limits
                    limits[start : start + len(limit)] = limit
                start += len(limit)
        else:
            limits = self._limit(values.abs(), history, *settings.to(values))
        dtype = values.dtype if flat.is_complex() else flat.dtype
        return None if limits is None else unflatten(limits.to(dtype), grads)

    def _limit(self, size: Tensor, rms: Tensor, times: Any, of_old: Any, of_new: Any, good: Any = None) -> Tensor:
        """Return the limit of each magnitude, and let its history learn from what is left, where the step is good."""
        largest = torch.finfo(size.dtype).max  # torch takes no number that the dtype does not hold
        ceiling = self.ceiling if self.ceiling <= largest else math.inf
        limit: Tensor = rms * times
        if self.floor or ceiling < math.inf:
            limit.clamp_(min(self.floor, largest), ceiling)
        limit.masked_fill_(rms == 0, ceiling)
        after = torch.hypot(rms * of_old, torch.minimum(size, limit) * of_new).clamp_(max=largest)
        if good is None:
            rms.copy_(after)
            return limit
        torch.where(good > 0, after, rms, out=rms)
        return limit if ceiling == math.inf else limit.masked_fill_(good == 0, math.inf)
