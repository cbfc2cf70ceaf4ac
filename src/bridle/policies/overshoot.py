import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _devices, _measure
from .._validate import count, floor_and_ceiling, number
from ..errors import UnsupportedGradientError
from .adaptive import Bounds
from .base import GradientView, Scale, clip_factor
from .built_once import BuiltOnce
from .element_memory import Chunk, ElementMemory, Keys, flatten
from .state import StateRows, accept_finite
from .window import empty, push, quantile

_CALM = 0.25  # the quantile of the norms: up to three steps of four may be outliers
# Of a calm step. Far below it weight decay, which is not clipped, undoes what was learned.
_LEAST, _MOST = 0.1, 4.0
_PULL = 0.005


@dataclass(eq=False)
class ByOvershoot(BuiltOnce):
    """Clip to a limit that shrinks when steps go too far and grows while they do not. This is `"auto"`.

    With d the last change of the parameters, g the gradient now and q the lower quartile of the last norms, a calm
    step: `limit <- limit exp(-rate cos(g, d))`, then pulled back by `limit <- limit (q / limit)^0.005`, between a tenth
    and four times of q. A positive cosine says that the loss rises along the last step, so it overshot; a negative one
    that it could have gone further. Late in a run noise alone makes the cosine positive, and weight decay, which is
    not clipped, does too: the pull and the floor keep the gradient stronger than either. The limit starts at `start`
    times the first norm, which is a warm-up of its own.

    The policy needs no threshold and no guess at the scale of the gradients, and costs a copy of the parameters. A
    parameter with a sparse gradient is compared where the gradient has entries, and copied whole. The rule is
    hypergradient descent (Baydin et al., Online Learning Rate Adaptation with Hypergradient Descent, arXiv 1703.04782)
    in a multiplicative form, for a limit on the norm instead of a learning rate, and with what the optimizer really did
    instead of the previous gradient.

    Args:
        rate: How far one step moves the limit, on a logarithmic scale.
        start: The first limit, relative to the first norm.
        window: How many norms the quartile is taken over.
        floor: A norm below this is never clipped.
        ceiling: A norm above this always is.

    Raises:
        ArgumentError: (a ValueError) A setting outside of its range.

    Examples:
        >>> policy = bridle.policies.ByOvershoot(rate=1.0)
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> for change, gradient in ((0.0, 1.0), (1.0, 1.0), (1.0, -1.0)):
        ...     _ = weight.data.add_(change)
        ...     weight.grad = torch.tensor([gradient])
        ...     print(round(bridle.clip_([weight], policy).norm_after, 3))
        0.3
        0.112
        0.305

    See Also:
        [`bridle.Clipper`][], [`bridle.policies.ByMedian`][]
    """

    p: ClassVar[float] = 2.0

    rate: float = 0.2
    start: float = 0.3
    window: int = 100
    _: KW_ONLY
    floor: float = 0.0
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        """Validate the arguments."""
        self.rate, self.start = number(self.rate, "rate"), number(self.start, "start", 0, 1)
        self.window = count(self.window, "window")
        self.floor, self.ceiling = floor_and_ceiling(self.floor, self.ceiling)
        self._before = ElementMemory()  # the parameters as they were a step ago

    @cached_property
    def _rows(self) -> StateRows:
        return StateRows({"limit": torch.zeros((), dtype=torch.float64), "window": empty(self.window)})

    def check(self, grads: GradientView) -> None:
        """Refuse gradients that cannot be compared with a change of their parameters."""
        super().check(grads)
        grads.refuse_plain_shards("ByOvershoot")
        grads.refuse_disjoint("ByOvershoot")
        self._plan(grads)

    def _plan(self, grads: GradientView) -> list[Chunk]:
        return self._before.plan(grads, _held(grads), _refuse_layouts)

    def decide(self, grads: GradientView) -> Scale:
        """Move the limit by what the last step turned out to be, and bring the norm down to it."""
        with torch.no_grad():
            keys, norm = [grads.pattern], grads.total_norm(self.p).reshape(1)
            state = self._rows.read(keys, norm)
            window = push(state["window"], state["seen"], norm)
            calm = quantile(window, _CALM)
            good = (norm > 0) & (norm < math.inf)
            moved = state["limit"] * torch.exp(-self.rate * self._overshoot(grads, norm, good))
            pulled = moved * (calm / moved) ** _PULL
            limit = torch.where(state["seen"] == 0, self.start * norm, pulled)
            limit = torch.minimum(torch.maximum(limit, _LEAST * calm), _MOST * calm)
            self._rows.write(keys, accept_finite(state, {"limit": limit, "window": window}, good))
            bounds = Bounds(torch.zeros_like(good), self.floor, self.ceiling)
            return Scale(clip_factor(bounds.clamp(limit), norm).reshape(()))

    def _overshoot(self, grads: GradientView, norm: Tensor, good: Tensor) -> Tensor:
        """Return the cosine between this gradient and the last change of the parameters: above 0, it went too far.

        Where the parameters are is remembered if the gradients are good.
        """
        weights, spans, plan = _held(grads), grads.spans_ranks(), self._plan(grads)
        changes = [self._change(chunk.keys, chunk.of(weights), good) for chunk in plan]
        length = _measure.total(grads.over_ranks(_measure.norms(changes, self.p), self.p), self.p)
        terms = []
        for chunk, change in zip(plan, changes, strict=True):
            # Divided before they are multiplied, so that no product overflows.
            change.div_(length.to(change.device))
            own = chunk.of(grads.values)
            lacks = spans and own[0].shape != weights[chunk.where[0]].shape  # a gradient that others have
            terms.append(norm.new_zeros(()) if lacks else _dot(change, own).to(norm))
        cosine = grads.over_ranks(torch.stack(terms)).sum() / norm
        return torch.where(torch.isfinite(cosine), cosine, 0.0)  # no change yet, or nothing to compare

    def _change(self, keys: Keys, parameters: list[Tensor], good: Tensor) -> Tensor:
        """Return how far parameters have moved since the last good step, end to end; remember where they are now."""
        now = _flat(parameters)
        before = self._before.read(keys, parameters, now)
        change = _wide(now) - _wide(before)
        if not _devices.readable_now([good]):
            before.copy_(torch.where(good.to(now.device), now, before))
        elif bool(good):
            before.copy_(now)
        return change

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned. It loads with `torch.load(..., weights_only=True)`."""
        return self._saved(**self._rows.state_dict(), before=self._before.state_dict())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state of another policy, or of one with other settings.
        """
        self._check_saved(saved)
        before = ElementMemory()
        before.load_state_dict(saved.get("before"))
        self._rows.load_state_dict(saved)
        self._before = before


def _held(grads: GradientView) -> list[Tensor]:
    """Return what this rank holds of each parameter."""
    return grads.weights() if grads.spans_ranks() else grads.parameters


def _refuse_layouts(grads: GradientView) -> None:
    for key, p, g in zip(grads.keys(), grads.parameters, grads.tensors, strict=True):
        if p.layout is not torch.strided or g.layout not in (torch.strided, torch.sparse_coo):
            raise UnsupportedGradientError(
                f"ByOvershoot compares a gradient with the change of its parameter, and {key!r} is {p.layout} with a "
                f"gradient that is {g.layout}. Give that parameter another policy by a name pattern."
            )


def _flat(tensors: list[Tensor]) -> Tensor:
    """Return the elements of tensors end to end, a complex one as its two parts."""
    flat = flatten(tensors)
    return torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat


def _wide(flat: Tensor) -> Tensor:
    return flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat


def _dot(change: Tensor, grads: list[Tensor]) -> Tensor:
    g = grads[0]
    if g.layout is torch.strided:
        return torch.dot(change, _wide(_flat(grads)).to(change))
    g = g.coalesce()
    parts = 2 if g.is_complex() else 1
    rows = change.view(*g.shape, *[parts] * (parts - 1))[tuple(g.indices())]
    return torch.dot(rows.reshape(-1), _wide(_flat([g.values()])).to(change))
