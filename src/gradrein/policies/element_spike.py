import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _devices, _kernels
from .._measure import magnitudes
from .._validate import count, decay_below_one, floor_and_ceiling, number
from ..errors import ArgumentError, UnsupportedGradientError
from .base import Clamp, GradientView
from .built_once import BuiltOnce
from .element_memory import Chunk, ElementMemory, flatten
from .state import StateRows


@dataclass(frozen=True)
class _Step:
    """What holds for the elements of each gradient in one step: a vector of each.

    Attributes:
        times: How many times its history an element may be.
        of_old: How much the history counts.
        of_new: How much this step counts.
        good: Whether to limit the gradient and learn from it.
    """

    times: Tensor
    of_old: Tensor
    of_new: Tensor
    good: Tensor

    def settings(self, chunk: Chunk) -> Tensor:
        """Return what holds for the gradients of a chunk as rows, for a kernel."""
        return chunk.columns(torch.stack([self.times, self.of_old, self.of_new, self.good.to(self.times)]))


@dataclass(eq=False)
class ByElementSpike(BuiltOnce):
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
        # The root of the moving average of squares of each element, corrected for its start at zero: it is as large as
        # the element, however slow the average.
        self._rms = ElementMemory()
        self._seen = StateRows({})  # how many steps each parameter has learned from

    def check(self, grads: GradientView) -> None:
        """Raise for gradients whose elements cannot be separated, or for state that belongs to another parameter."""
        super().check(grads)
        grads.refuse_plain_shards("ByElementSpike")
        grads.refuse_shared_elements()
        grads.require_copies("ByElementSpike")
        self._plan(grads)

    def _plan(self, grads: GradientView) -> list[Chunk]:
        return self._rms.plan(grads, grads.weights() if grads.spans_ranks() else grads.values, _refuse_sparse)

    def decide(self, grads: GradientView) -> Clamp:
        """Limit each element by its own history, and update the history."""
        with torch.no_grad():
            keys, values, norms = grads.keys(), grads.values, grads.norms(self.p)
            seen, good = self._seen.read(keys, norms)["seen"], (norms > 0) & torch.isfinite(norms)
            known = seen >= self.warmup  # no limit without a history
            times = torch.full_like(seen, math.sqrt(self.theta)).masked_fill_(known.logical_not(), math.inf)
            # The weight of this step among all so far: 1 - decay over 1 - decay ** (seen + 1), without cancellation.
            rate = math.log(self.decay) if self.decay else -math.inf
            new = (1 - self.decay) / -torch.expm1((seen + 1) * rate)
            of_old, of_new = (1 - new).clamp(min=0).sqrt(), new.sqrt()
            step = _Step(times, of_old, of_new, good)
            plan = self._plan(grads)
            firsts = [values[chunk.where[0]] for chunk in plan]  # of a chunk all are on one device
            known_good = _devices.readable_now(firsts) and bool(good.all())
            limits: list[Tensor | None] = [None] * len(keys)
            spans = grads.spans_ranks()
            weights = grads.weights() if spans else []
            for chunk in plan:
                own = chunk.of(values)
                lacks = spans and own[0].shape != weights[chunk.where[0]].shape
                if lacks:  # a gradient of which others have shards: it is learned from as zeros
                    own = [torch.zeros_like(weights[chunk.where[0]])]
                found = self._limit_natively(chunk, own, step)
                if found is None:
                    found = self._limit(chunk, own, step, known_good)
                for i, limit in ({} if lacks else found).items():
                    limits[i] = limit
            self._seen.write(keys, {"seen": seen + good})
            return Clamp(limits)

    def _limit_natively(self, chunk: Chunk, grads: list[Tensor], step: _Step) -> dict[int, Tensor] | None:
        """Return the limits of the gradients that exceed theirs, and learn; None where no kernel takes them."""
        backend = _kernels.native(grads, None)
        rms = self._rms.known(chunk.keys) if backend is not None else None
        if backend is None or rms is None or step.good.device != rms.device:
            return None
        found = backend.limit_spikes_(grads, rms, step.settings(chunk), self.floor, self.ceiling)
        if found is None or not found[1]:
            return None if found is None else {}
        pieces = found[0].split_with_sizes(chunk.sizes.tolist())
        return {chunk.where[i]: pieces[i].view(grads[i].shape) for i in found[1]}

    def _limit(self, chunk: Chunk, grads: list[Tensor], step: _Step, known_good: bool) -> dict[int, Tensor]:
        """Return limits by index; nothing where none is known to be exceeded. Learn from gradients that are good."""
        size = _sizes(grads)
        rms = self._rms.read(chunk.keys, grads, torch.zeros_like(size))
        times, of_old, of_new = (
            chunk.spread(each.to(size.dtype), size.device) for each in (step.times, step.of_old, step.of_new)
        )
        largest = torch.finfo(size.dtype).max  # torch takes no number that the dtype does not hold
        floor, ceiling = min(self.floor, largest), min(self.ceiling, largest)
        limit = torch.where(rms > 0, (times * rms).clamp_(floor, ceiling), ceiling)
        clipped = torch.minimum(size, limit)
        after = _hypot(of_old * rms, of_new * clipped)
        after.clamp_(max=torch.finfo(after.dtype).max)
        if not known_good:
            good = chunk.spread(step.good, size.device)
            limit, after = torch.where(good, limit, math.inf), torch.where(good, after, rms)
        self._rms.write(chunk.keys, after)
        if known_good and torch.equal(clipped, size):
            return {}
        pieces = limit.split_with_sizes(chunk.sizes.tolist())
        return {i: t.view(g.shape) for i, t, g in zip(chunk.where, pieces, grads, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Load it with `torch.load(..., weights_only=True)`."""
        return self._saved(corrected_rms=self._rms.state_dict(), seen=self._seen.state_dict())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state is from another policy, or from one with other settings.
        """
        self._check_saved(saved)
        rms, seen = saved.get("corrected_rms"), saved.get("seen")
        if not isinstance(rms, Mapping) or not isinstance(seen, Mapping):
            raise ArgumentError(
                "the saved state has no `corrected_rms` and `seen`: it is damaged, or of another version. Load what "
                "`state_dict()` of a ByElementSpike returned."
            )
        loaded = ElementMemory()
        loaded.load_state_dict(rms)
        self._seen.load_state_dict(seen)
        self._rms = loaded


def _hypot(a: Tensor, b: Tensor) -> Tensor:
    """Return the root of a² + b², of float32 on the CPU in float64: where the kernel is not used, to the same bit."""
    if a.dtype != torch.float32 or a.device.type != "cpu":
        return torch.hypot(a, b)
    return (a.double().square() + b.double().square()).sqrt().float()


def _refuse_sparse(grads: GradientView) -> None:
    for key, g in zip(grads.keys(), grads.values, strict=True):
        if g.layout is not torch.strided:
            raise UnsupportedGradientError(
                f"ByElementSpike remembers every element, and the gradient {key!r} is {g.layout}. Give that "
                "parameter another policy by a name pattern, or use a dense gradient."
            )


def _sizes(grads: list[Tensor]) -> Tensor:
    """Return the magnitude of every element, end to end, as float32 or wider."""
    size = magnitudes(flatten(grads))
    return size.float() if size.dtype in (torch.float16, torch.bfloat16) else size
