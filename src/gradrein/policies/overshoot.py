import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import _measure
from .._validate import count, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .adaptive import Bounds
from .base import GradientView, Scale
from .elements import ElementMemory, flatten, real_parts, together
from .state import LearningPolicy, State, StateRows, accept_finite
from .window import empty, push, quantile

_CALM = 0.25  # the quantile of the norms: up to three steps of four may be outliers
_LEAST = 0.1  # of a calm step: far below it weight decay, which is not clipped, undoes what was learned
_ROUNDING = 2.0**-20  # of the displacement: if leaving out decay leaves no more than this, it is rounding errors
_PULL = 0.005  # late in a run noise alone makes the cosine positive: the limit must not follow it for ever
# How many steps the average of the parameters is over: first ones have to tell soon, later ones what they add up to.
_FIRST, _GROWTH, _LONGEST = 5.0, 0.25, 60.0


class Displacement:
    """How far some parameters are from a moving average of where they were.

    Args:
        parameters: The parameters, end to end.
        average: Their average.
        grads: Their gradients.
    """

    def __init__(self, parameters: Tensor, average: Tensor, grads: list[Tensor]) -> None:
        self._parameters, self._average, self._grads = parameters, average, grads
        self._vector = parameters - average

    def follow(self, share: Tensor) -> Tensor:
        """Return the average after it took a share of the displacement; as it was where the share is zero."""
        return torch.where(share > 0, self._average + self._vector * share, self._average)

    def outward(self) -> Tensor:
        """Return how far it leads away from zero, times the distance of the parameters, and that distance squared."""
        distance = _measure.norms([self._parameters], 2.0)
        return torch.cat([torch.dot(self._vector, self._parameters).to(distance).reshape(1), distance.square()])

    def leave_out(self, shrunk: Tensor) -> Tensor:
        """Leave out this part of the parameters, which leads straight to zero. Return the length before and after."""
        before = _measure.norms([self._vector], 2.0)
        self._vector = torch.addcmul(self._vector, self._parameters, shrunk.to(self._parameters))
        return torch.cat([before, _measure.norms([self._vector], 2.0)])

    def dot(self, length: Tensor) -> Tensor:
        """Return its product with the gradients, over a length."""
        # Divided before it is multiplied, so that no product overflows.
        vector, g = self._vector / length.to(self._vector), self._grads[0]
        if g.layout is torch.strided:
            return torch.dot(vector, real_parts(flatten(self._grads)).to(vector))
        g = g.coalesce()
        parts = 2 if g.is_complex() else 1
        rows = vector.view(*g.shape, *[parts] * (parts - 1))[tuple(g.indices())]
        return torch.dot(rows.reshape(-1), real_parts(flatten([g.values()])).to(vector))


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
        grads.refuse_plain_shards("ByOvershoot")
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
            keys, norm, rows = [grads.pattern], grads.total_norm(self.p).reshape(1), self._memory["rows"]
            state = rows.read(keys, norm)
            good = (norm > 0) & (norm < math.inf)
            share = good / (_FIRST + _GROWTH * state["seen"]).clamp(max=_LONGEST)
            after, factor = self._learn(state, norm, self._cosine(grads, norm, share))
            rows.write(keys, after)
            return Scale(factor)

    def _learn(self, state: State, norm: Tensor, cosine: Tensor) -> tuple[State, Tensor]:
        """Return the next state and the factor of the gradients, without reading a value from a device."""
        window = push(state["window"], state["seen"], norm)
        calm, largest = quantile(window, _CALM), window.masked_fill(window.isnan(), -math.inf).amax(1)
        moved = state["limit"] * torch.exp(-self.rate * cosine)
        pulled = moved * (calm / moved) ** _PULL
        limit = torch.where(state["seen"] == 0, self.start * norm, pulled)
        limit = torch.minimum(torch.maximum(limit, _LEAST * calm), largest)
        good = (norm > 0) & (norm < math.inf)
        after = accept_finite(state, {"limit": limit, "window": window}, good)
        bounds = Bounds(torch.zeros_like(good), self.floor, self.ceiling)
        return after, _measure.clip_factor(bounds.clamp(limit), norm).reshape(())

    def _cosine(self, grads: GradientView, norm: Tensor, share: Tensor) -> Tensor:
        """Return the cosine between this gradient and the displacement of the parameters from their average.

        The average takes a share of the displacement: none if the gradients are not good.
        """
        found = self._displacements(grads, share)
        outward = torch.stack([d.outward().to(norm) for d in found], 1)
        along, square = grads.combined(outward).sum(1)
        shrunk = _or_zero(-along / square).clamp_(min=0)
        lengths = torch.stack([d.leave_out(shrunk).to(norm) for d in found], 1)
        whole, length = _measure.total(grads.combined(lengths, self.p).T, self.p)
        products = torch.stack([d.dot(length).to(norm) for d in found])
        cosine = grads.combined(products).sum() / norm
        return _or_zero(cosine * (length > _ROUNDING * whole))  # not finite: not moved yet, or nothing to compare

    def _displacements(self, grads: GradientView, share: Tensor) -> list[Displacement]:
        """Return how far parameters are from their average, group by group, and let it follow them."""
        memory, keys, weights, found = self._memory["average"], grads.keys(), grads.weights(), list[Displacement]()
        for where in together(grads):
            own, names = [weights[i] for i in where], [keys[i] for i in where]
            place = real_parts(flatten(own))
            found.append(Displacement(place, memory.read(names, own, place), [grads.values[i] for i in where]))
            # Not in place: a tensor from inference mode cannot be changed outside of it.
            memory.write(names, own, found[-1].follow(share.to(place)))
        return found


def _or_zero(t: Tensor) -> Tensor:
    """Return finite values, and zero for others."""
    return torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0)
