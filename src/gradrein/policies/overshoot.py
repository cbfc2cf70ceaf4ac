import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _kernels, _measure
from .._torch.dtensor import is_dtensor
from .._validate import count, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .adaptive import Bounds
from .base import GradientView, Scale, clip_factor
from .built_once import BuiltOnce
from .element_memory import Chunk, ElementMemory, flatten
from .state import State, StateRows, accept_finite
from .window import empty, push, quantile_and_largest

_CALM = 0.25  # the quantile of the norms: up to three steps of four may be outliers
_LEAST = 0.1  # of a calm step: far below it weight decay, which is not clipped, undoes what was learned
_ROUNDING = 2.0**-20  # of the way: if leaving out decay leaves no more than this, it is rounding errors
_TINY = torch.finfo(torch.float64).tiny  # below it a factor is subnormal: see `clip_factor`
_PULL = 0.005  # late in a run noise alone makes the cosine positive: the limit must not follow it for ever
# How many steps the average of the parameters is over: first ones have to tell soon, later ones what they add up to.
_FIRST, _GROWTH, _LONGEST = 5.0, 0.25, 60.0


class _Way:
    """How far parameters are from their average: in torch operations, for any tensors."""

    counts = True

    def __init__(self, place: Tensor, way: Tensor, grads: list[Tensor] | None) -> None:
        self._place, self._way, self._grads = place, way, grads

    def inward(self) -> Tensor:
        """Return how far it leads away from zero, times the distance of the place, and that distance squared."""
        return torch.stack([torch.dot(self._way, self._place), torch.dot(self._place, self._place)])

    def leave_out(self, shrunk: Tensor) -> Tensor:
        """Leave out this part of the place, which leads straight to zero. Return the length before and after."""
        before = _measure.norms([self._way], 2.0)
        self._way.addcmul_(self._place, shrunk.to(self._place))
        return torch.cat([before, _measure.norms([self._way], 2.0)])

    def dot(self, length: Tensor) -> Tensor:
        """Return its product with the gradients over a length."""
        if self._grads is None:
            return length.new_zeros(())
        # Divided before they are multiplied, so that no product overflows.
        return _dot(self._way.div_(length.to(self._way.device)), self._grads)


class _AbsentWay(_Way):
    """The same of a parameter without a gradient on this rank: it counts, and is learned from, if others have one.

    Args:
        place: Where the parameter is.
        average: Where it was, on average; None if it was never seen.
        follow: Lets the average follow it, where a 0-dim tensor says so.
    """

    counts = False

    def __init__(self, place: Tensor, average: Tensor | None, follow: Callable[[Tensor], None]) -> None:
        super().__init__(place, torch.zeros_like(place) if average is None else place - average, None)
        self.follow = follow


class _MeasuredWay:
    """The same from sums that a kernel found: products of the way, the place and the gradients."""

    counts = True

    def __init__(self, sums: Sequence[float]) -> None:
        self.sums = sums
        self._ww, self._wp, self._pp, self._wg, self._pg = sums
        self._shrunk = 0.0

    def cosine(self, norm: float) -> float:
        """Return the cosine with gradients of this norm, where no others are to be compared."""
        self._shrunk = max(-self._wp / self._pp, 0.0) if self._pp > 0 else 0.0
        whole, length = self._lengths()
        if not (length > _ROUNDING * whole and 0 < norm < math.inf):
            return 0.0
        found = (self._wg + self._shrunk * self._pg) / length / norm
        return found if math.isfinite(found) else 0.0

    def _lengths(self) -> tuple[float, float]:
        after = self._ww + self._shrunk * (2 * self._wp + self._shrunk * self._pp)
        return math.sqrt(self._ww), math.sqrt(max(after, 0.0))

    def inward(self) -> Tensor:
        """Return how far it leads away from zero, times the distance of the place, and that distance squared."""
        return torch.tensor([self._wp, self._pp], dtype=torch.float64)

    def leave_out(self, shrunk: Tensor) -> Tensor:
        """Leave out this part of the place, which leads straight to zero. Return the length before and after."""
        self._shrunk = shrunk.item()
        return torch.tensor(self._lengths(), dtype=torch.float64)

    def dot(self, length: Tensor) -> Tensor:
        """Return its product with the gradients over a length."""
        return (self._wg + self._shrunk * self._pg) / length


@dataclass(eq=False)
class ByOvershoot(BuiltOnce):
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
        self._average = ElementMemory()  # of where the parameters were

    @cached_property
    def _rows(self) -> StateRows:
        return StateRows({"limit": torch.zeros((), dtype=torch.float64), "window": empty(self.window)})

    def check(self, grads: GradientView) -> None:
        """Raise for gradients that cannot be compared with the movement of their parameters."""
        super().check(grads)
        grads.refuse_plain_shards("ByOvershoot")
        grads.refuse_disjoint("ByOvershoot")
        self._plan(grads)

    def _plan(self, grads: GradientView) -> list[Chunk]:
        return self._average.plan(grads, _held(grads), _refuse_layouts)

    def decide(self, grads: GradientView) -> Scale:
        """Adjust the limit by the outcome of the last steps, and reduce the norm to it."""
        with torch.no_grad():
            keys, norm = [grads.pattern], grads.total_norm(self.p).reshape(1)
            state = self._rows.read(keys, norm)
            good = (norm > 0) & (norm < math.inf)
            share = good / (_FIRST + _GROWTH * state["seen"]).clamp(max=_LONGEST)
            cosine = self._overshoot(grads, norm, share)
            if isinstance(cosine, float):
                after, factor = self._learn_number(state, norm, cosine)
            else:
                after, factor = self._learn(state, norm, cosine)
            self._rows.write(keys, after)
            return Scale(factor)

    def _learn(self, state: State, norm: Tensor, cosine: Tensor) -> tuple[State, Tensor]:
        """Return the next state and the factor of the gradients, without reading a value from a device."""
        window = push(state["window"], state["seen"], norm)
        calm, largest = quantile_and_largest(window, _CALM)
        moved = state["limit"] * torch.exp(-self.rate * cosine)
        pulled = moved * (calm / moved) ** _PULL
        limit = torch.where(state["seen"] == 0, self.start * norm, pulled)
        limit = torch.minimum(torch.maximum(limit, _LEAST * calm), largest)
        good = (norm > 0) & (norm < math.inf)
        after = accept_finite(state, {"limit": limit, "window": window}, good)
        bounds = Bounds(torch.zeros_like(good), self.floor, self.ceiling)
        return after, clip_factor(bounds.clamp(limit), norm).reshape(())

    def _learn_number(self, state: State, norm: Tensor, cosine: float) -> tuple[State, Tensor]:
        """Return the same, to the bit, where the cosine is at hand: eighty operations on single values take long."""
        seen, size, window = state["seen"].item(), norm.item(), state["window"][0].tolist()
        window[int(seen) % len(window)] = size
        ordered = sorted(value for value in window if not math.isnan(value))
        if not (0 < size < math.inf and ordered[0] > 0 and ordered[-1] < math.inf):
            return self._learn(state, norm, norm.new_tensor([cosine]))
        at = _CALM * (len(ordered) - 1)
        below, above = ordered[math.floor(at)], ordered[math.ceil(at)]
        calm = below if below == above else below + (above - below) * (at - math.floor(at))
        # exp and the power are torch's, which may round the last bit in another way than Python.
        moved = state["limit"] * torch.exp(norm.new_tensor([-self.rate * cosine]))
        limit = self.start * size if seen == 0 else (moved * (norm.new_tensor([calm]) / moved) ** _PULL).item()
        if math.isnan(limit):
            return self._learn(state, norm, norm.new_tensor([cosine]))
        limit = min(max(limit, _LEAST * calm), ordered[-1])
        after = {"seen": state["seen"] + 1, "limit": norm.new_tensor([limit]), "window": norm.new_tensor([window])}
        most = min(max(limit, self.floor), self.ceiling)
        factor = most / size if most < size else 1.0
        return after, norm.new_tensor(factor if factor >= _TINY else math.nextafter(factor, 0.0))

    def _overshoot(self, grads: GradientView, norm: Tensor, share: Tensor) -> Tensor | float:
        """Return the cosine between this gradient and the way from the average of the parameters to where they are.

        The average takes a share of where they are: none if the gradients are not good.
        """
        ways = self._ways(grads, share)
        if not ways:
            return norm.new_zeros(())
        measured = [way.sums for way in ways if isinstance(way, _MeasuredWay)]
        if measured and len(measured) == len(ways) and not grads.spans_ranks():
            return _MeasuredWay([*map(sum, zip(*measured, strict=True))]).cosine(norm.item())
        counts = norm.new_tensor([float(way.counts) for way in ways])
        each = torch.cat([torch.stack([way.inward().to(norm) for way in ways], 1), counts[None]])
        *found, held = grads.over_ranks(each)
        counted = held > 0  # of the others no rank has a gradient
        along, square = (torch.where(counted, one, 0.0).sum() for one in found)
        for way, had in zip(ways, counted, strict=True):
            if isinstance(way, _AbsentWay):
                way.follow(had)
        shrunk = _or_zero(-along / square).clamp_(min=0)
        lengths = torch.stack([way.leave_out(shrunk).to(norm) for way in ways], 1)
        lengths = torch.where(counted, grads.over_ranks(lengths, self.p), 0.0)
        whole, length = _measure.total(lengths.T, self.p)
        terms = torch.stack([way.dot(length).to(norm) for way in ways])
        cosine = grads.over_ranks(terms).sum() / norm
        return _or_zero(cosine * (length > _ROUNDING * whole))  # not finite: not moved yet, or nothing to compare

    def _ways(self, grads: GradientView, share: Tensor) -> list[_Way | _MeasuredWay]:
        """Return how far parameters are from their average, chunk by chunk; let it follow them."""
        weights, found = _held(grads), list[_Way | _MeasuredWay]()
        for chunk in self._plan(grads):
            place, own, first = chunk.of(weights), chunk.of(grads.values), chunk.where[0]
            # Of a sharded gradient that this rank lacks others may have a part.
            absent = is_dtensor(grads.parameters[first]) and not is_dtensor(grads.tensors[first])
            found.append(self._absent_way(chunk, place, share) if absent else self._way(chunk, place, own, share))
        return found

    def _way(self, chunk: Chunk, parameters: list[Tensor], grads: list[Tensor], share: Tensor) -> _Way | _MeasuredWay:
        """Return how far some parameters are from their average; let it follow them."""
        backend = _kernels.native(parameters, None)
        average = self._average.known(chunk.keys) if backend is not None else None
        if backend is not None and average is not None and share.device == average.device:
            step = share.item()
            # Of a bad step nothing is compared, and its parameters may be infinite, which zero times is no zero.
            found = backend.follow_(parameters, grads, average, step) if step else (0.0,) * 5
            if found is not None:
                return _MeasuredWay(found)
        place = _wide(_flat(parameters))
        return _Way(place, self._follow(chunk, parameters, place, share), grads)

    def _absent_way(self, chunk: Chunk, parameters: list[Tensor], share: Tensor) -> _AbsentWay:
        """Return the same where this rank has no gradient; the average follows once others are known to have one."""
        place = _wide(_flat(parameters))
        average = self._average.known(chunk.keys)

        def follow(had: Tensor) -> None:
            if average is not None or bool(had):  # what was never seen stays so
                self._follow(chunk, parameters, place, share * had)

        return _AbsentWay(place, None if average is None else average.to(place), follow)

    def _follow(self, chunk: Chunk, parameters: list[Tensor], place: Tensor, share: Tensor) -> Tensor:
        """Return the way from the average to the place, and let the average take a share of it."""
        average = self._average.read(chunk.keys, parameters, place)
        way = place - average
        share = share.to(way)
        moved = average + way * share  # not lerp, which rounds now once and now twice
        # Not in place: a tensor from inference mode cannot be changed outside of it.
        self._average.write(chunk.keys, torch.where(share > 0, moved, average))
        return way

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Load it with `torch.load(..., weights_only=True)`."""
        return self._saved(**self._rows.state_dict(), average=self._average.state_dict())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state is from another policy, or from one with other settings.
        """
        self._check_saved(saved)
        average = ElementMemory()
        average.load_state_dict(saved.get("average"))
        self._rows.load_state_dict(saved)
        self._average = average


def _held(grads: GradientView) -> list[Tensor]:
    """Return what this rank holds of each parameter."""
    return grads.weights() if grads.spans_ranks() else grads.parameters


def _refuse_layouts(grads: GradientView) -> None:
    for key, p, g in zip(grads.keys(), grads.parameters, grads.tensors, strict=True):
        if p.layout is not torch.strided or g.layout not in (torch.strided, torch.sparse_coo):
            raise UnsupportedGradientError(
                f"ByOvershoot compares a gradient with the movement of its parameter, and {key!r} is {p.layout} with a "
                f"gradient that is {g.layout}. Give that parameter another policy by a name pattern."
            )


def _or_zero(t: Tensor) -> Tensor:
    """Return finite values, and zero for others."""
    return torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0)


def _flat(tensors: list[Tensor]) -> Tensor:
    """Return the elements of tensors end to end, a complex one as its two parts."""
    flat = flatten(tensors)
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat


def _wide(flat: Tensor) -> Tensor:
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def _dot(way: Tensor, grads: list[Tensor]) -> Tensor:
    g = grads[0]
    if g.layout is torch.strided:
        return torch.dot(way, _wide(_flat(grads)).to(way))
    g = g.coalesce()
    parts = 2 if g.is_complex() else 1
    rows = way.view(*g.shape, *[parts] * (parts - 1))[tuple(g.indices())]
    return torch.dot(rows.reshape(-1), _wide(_flat([g.values()])).to(way))
