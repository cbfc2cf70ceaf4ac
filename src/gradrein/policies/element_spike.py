import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import _devices
from .._measure import magnitudes
from .._validate import count, decay_below_one, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .base import Clamp, GradientView
from .elements import ElementMemory, flatten, real_parts, together
from .state import LearningPolicy, StateRows


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
        grads.refuse_plain_shards("ByElementSpike")
        grads.refuse_shared_elements()
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
            seen, good = rows.read(keys, norms)["seen"], (norms > 0) & torch.isfinite(norms)
            # The weight of this step among all so far: 1 - decay over 1 - decay ** (seen + 1), without cancellation.
            rate = math.log(self.decay) if self.decay else -math.inf
            new = (1 - self.decay) / -torch.expm1((seen + 1) * rate)
            # How many times its history an element may be, without a limit where there is none; how much that and
            # this step count; whether to limit and to learn at all.
            times = torch.full_like(seen, math.sqrt(self.theta)).masked_fill_(seen < self.warmup, math.inf)
            settings = torch.stack([times, (1 - new).clamp(min=0).sqrt(), new.sqrt(), good.to(new)])
            columns, limits = settings.unbind(1), list[Tensor | None]([None] * len(keys))
            for where in together(grads):
                own = [grads.values[i] for i in where]
                found = self._limits([keys[i] for i in where], own, [columns[i] for i in where])
                for i, limit in zip(where, found, strict=True):
                    limits[i] = limit
            rows.write(keys, {"seen": seen + good})
            return Clamp(limits)

    def _limits(self, keys: list[str], grads: list[Tensor], settings: list[Tensor]) -> Sequence[Tensor | None]:
        """Return the limits of the elements of some gradients, None where all are below, and learn from them."""
        memory: ElementMemory = self._memory["corrected_rms"]
        size = real_parts(magnitudes(flatten(grads)))
        rms = memory.read(keys, grads, torch.zeros_like(size))
        each = [own[:, None] for own in settings]
        if len(grads) > 1:  # of a single gradient one column is enough
            each = [own.expand(-1, g.numel()) for own, g in zip(each, grads, strict=True)]
        times, of_old, of_new, good = torch.cat(each, dim=1).to(size)
        largest = torch.finfo(size.dtype).max  # torch takes no number that the dtype does not hold
        floor, ceiling = min(self.floor, largest), min(self.ceiling, largest)
        limit = torch.where(rms > 0, (times * rms).clamp_(floor, ceiling), ceiling)
        after = torch.hypot(of_old * rms, of_new * torch.minimum(size, limit)).clamp_(max=largest)
        memory.write(keys, grads, torch.where(good > 0, after, rms))
        limit = torch.where(good > 0, limit, math.inf)
        if _devices.readable_now([size]) and not bool((size > limit).any()):
            return [None] * len(grads)  # then nothing is written
        found = limit.split_with_sizes([g.numel() for g in grads])
        return [own.view(g.shape) for own, g in zip(found, grads, strict=True)]
