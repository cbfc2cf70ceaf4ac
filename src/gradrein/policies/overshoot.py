import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import _devices, _kernels, _measure
from .._devices import accumulation_dtype
from .._validate import count, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .base import GradientView, Scale
from .elements import ElementMemory, blocks, flatten, real_parts, together
from .state import LearningPolicy, State, StateRows, accepted, finite
from .window import empty, push, quantile_and_largest

_CALM = 0.25  # the quantile of the norms: up to three steps of four may be outliers
_LEAST = 0.1  # of a calm step: far below it weight decay, which is not clipped, undoes what was learned
_ROUNDING = 2.0**-40  # of the squared displacement: if leaving out decay leaves no more, it is rounding errors
_PULL = 0.005  # late in a run noise alone makes the cosine positive: the limit must not follow it for ever
# How many steps the average of the parameters is over: first ones have to tell soon, later ones what they add up to.
_FIRST, _GROWTH, _LONGEST = 5.0, 0.25, 60.0


@dataclass(eq=False)
class ByOvershoot(LearningPolicy):
    """Clip to a limit that shrinks when steps overshoot and grows while they make progress. This is `"auto"`.

    Let g be the current gradient, d the offset of the parameters from a moving average of their positions, and q the
    lower quartile of the last norms, which stands for a calm step. The update is `limit <- limit exp(-rate cos(g, d))`,
    then a pull back, `limit <- limit (q / limit)^0.005`, kept between a tenth of q and the largest of the last norms.
    A positive cosine means that the loss rises in the direction of recent movement: the run went too far or in circles.
    A negative cosine means that it could have gone further. The average is over the last 5 steps at first and over 60
    from step 220 on: a single step overshoots in the sharpest direction even while the run makes progress in all
    others. The component of d that points straight to zero is left out, because weight decay moves there and is
    not clipped. Late in a run noise alone makes the cosine positive: the pull and the floor keep the gradient
    stronger than noise and than weight decay.

    The policy needs no threshold and no guess at the scale of the gradients. It costs a copy of the parameters, in
    float32 for narrower dtypes. A parameter with a sparse gradient is compared where the gradient has entries, and
    copied as a whole. The rule is hypergradient descent (Baydin et al., Online Learning Rate Adaptation with
    Hypergradient Descent, arXiv 1703.04782) in a multiplicative form, for a limit on the norm instead of a learning
    rate, and with the actual movement of the parameters instead of the previous gradient.

    Args:
        rate: How far one step moves the limit, on a logarithmic scale.
        start: The first limit, relative to the first norm.
        window: The number of norms for the quartile.
        floor: A norm below this is never clipped.
        ceiling: A norm above this is always clipped.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByOvershoot(rate=1.0)
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> for change, gradient in ((0.0, 1.0), (1.0, 1.0), (1.0, -1.0)):
        ...     _ = weight.data.add_(change)
        ...     weight.grad = torch.tensor([gradient])
        ...     print(round(gradrein.clip_([weight], policy).norm_after, 3))
        1.0
        0.37
        1.0

    See Also:
        [`gradrein.Clipper`][], [`gradrein.policies.ByMedian`][]
    """

    p: ClassVar[float] = 2.0

    rate: float = 0.2
    start: float = 1.0
    window: int = 100
    _: KW_ONLY
    floor: float = 0.0
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        """Validate the arguments."""
        self.rate, self.start = number(self.rate, "rate"), number(self.start, "start", 0, 1)
        self.window = count(self.window, "window")
        self.floor, self.ceiling = floor_and_ceiling(self.floor, self.ceiling)

    def _new_memory(self) -> dict[str, StateRows | ElementMemory]:
        rows = StateRows({"limit": torch.zeros((), dtype=torch.float64), "window": empty(self.window)})
        return {"rows": rows, "average": ElementMemory()}

    def check(self, grads: GradientView) -> None:
        """Raise for gradients that cannot be compared with the movement of their parameters."""
        grads.refuse_disjoint("ByOvershoot")
        for key, p, g in zip(grads.keys(), grads.parameters, grads.tensors, strict=True):
            if p.layout is not torch.strided or g.layout not in (torch.strided, torch.sparse_coo):
                raise UnsupportedGradientError(
                    f"ByOvershoot compares a gradient with the movement of its parameter, and {key!r} is {p.layout} "
                    f"with a gradient that is {g.layout}. Give that parameter another policy by a name pattern."
                )
        self._memory["average"].check(grads)

    def decide(self, grads: GradientView) -> Scale:
        """Adjust the limit by the outcome of the last steps, and reduce the norm to it."""
        with torch.no_grad():
            keys, norm, rows = [grads.pattern], finite(grads.total_norm(self.p).reshape(1)), self._memory["rows"]
            state, good = rows.read(keys, norm), norm > 0
            share = good / torch.rsub(state["seen"], _FIRST, alpha=-_GROWTH).clamp_(max=_LONGEST)
            limit, after = self._learn(state, norm, self._cosine(grads, norm, share))
            rows.write(keys, accepted(state, after, good, guarded=_measure.needs_rescaling(grads.tensors, 2.0)))
            if self.floor or self.ceiling < math.inf:
                limit = limit.clamp(self.floor, self.ceiling).nan_to_num_(self.ceiling)
            return Scale(_measure.clip_factor_or_one(limit, norm).reshape(()))

    def _learn(self, state: State, norm: Tensor, cosine: Tensor) -> tuple[Tensor, State]:
        """Return the limit and the next state."""
        seen = state["seen"]
        window = push(state["window"], norm)
        calm, largest = quantile_and_largest(window, _CALM, seen)
        moved = state["limit"] * torch.exp(-self.rate * cosine)
        pulled = moved * (calm / moved) ** _PULL
        limit = torch.where(seen == 0, self.start * norm, pulled)
        limit = torch.clamp(limit, _LEAST * calm, largest)
        return limit, {"limit": limit, "window": window}

    def _cosine(self, grads: GradientView, norm: Tensor, share: Tensor) -> Tensor:
        """Return the cosine between this gradient and the displacement of the parameters from their average.

        The average takes a share of the displacement: none if the gradients are not good.
        """
        memory, keys, weights, sums = self._memory["average"], grads.keys(), grads.weights(), list[Tensor]()
        for where in together(grads):
            own = [weights[i] for i in where]
            place = real_parts(flatten(own))
            average = memory.read([keys[i] for i in where], own, place)
            values = real_parts(flatten([grads.values[i] for i in where])).to(place)
            sums.append(_follow(place, average, values, share.to(place.device).reshape(())).to(norm))
        products = sums[0]
        if len(sums) > 1 or grads.is_split:
            products = grads.combined(torch.stack(sums, 2).flatten(0, 1)).view(3, 3, -1).sum(2)
        (dd, dp, dg), (_, pp, pg), _ = products
        grown = _or_zero(dp / pp).clamp_(max=0)  # what is negative of it leads straight to zero, and is left out
        square = torch.addcmul(dd, grown, dp, value=-1)
        cosine = torch.addcmul(dg, grown, pg, value=-1) / (square.sqrt() * norm)
        return _or_zero(cosine * (square > _rounding(norm) * dd))  # not finite: not moved yet, or nothing to compare


def _follow(place: Tensor, average: Tensor, grad: Tensor, share: Tensor) -> Tensor:
    """Let the average of parameters take a share of the displacement from it, in place.

    Return the products of displacement, parameters and gradients with each other: in float64 what cancels is left.
    """
    wide, taken = accumulation_dtype(place.device), share.item() if _devices.readable_now([share]) else None
    if taken == 0:  # of a bad step nothing is compared
        return torch.zeros(3, 3, dtype=wide, device=place.device)
    backend = _kernels.native([place], None) if taken is not None else None
    sums = backend.follow_(place, grad, average, taken) if backend is not None and taken is not None else None
    if sums is not None:
        dd, dp, pp, dg, pg = sums
        return torch.tensor([[dd, dp, dg], [dp, pp, pg], [dg, pg, math.nan]], dtype=wide, device=place.device)
    products = []
    for p, mean, g in blocks(place, average, grad):
        way = p - mean
        rows = torch.stack([way, p, g], out=torch.empty(3, len(p), dtype=wide, device=p.device))
        products.append(rows @ rows.T)
        if taken is None:  # parameters of a bad step may be infinite
            mean.addcmul_(way.masked_fill_(share == 0, 0.0), share)
        else:
            mean.add_(way, alpha=taken)
    return products[0] if len(products) == 1 else torch.stack(products).sum(0)


def _rounding(like: Tensor) -> float:
    return max(_ROUNDING, 256 * torch.finfo(like.dtype).eps)


def _or_zero(t: Tensor) -> Tensor:
    """Return finite values, and zero for others."""
    return torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0)
