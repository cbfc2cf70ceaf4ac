"""Know what gradients were before they were clipped, by whomever and however often."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._events import ClipEvent
from ..._torch.dtensor import is_dtensor
from ...errors import UnsupportedGradientError
from .measure import Measurement, measure_gradients
from .shards import is_flattened, local_shard
from .writer import rounded


@dataclass
class _Clipped:
    """A gradient that was clipped since it was computed.

    Attributes:
        grad: The gradient, by identity.
        version: Its version counter after the last clipping: while that stays, nobody has written to it since.
        norm: Its norm before the first.
        nonfinite: How many of its values were NaN or infinite then.
        calls: The clippings, and to which gradients each was applied.
    """

    grad: weakref.ref[Tensor]
    version: int | None
    norm: float | None
    nonfinite: int
    calls: list[tuple[ClipEvent, frozenset[int]]] = field(default_factory=list)

    def is_about(self, grad: Tensor | None) -> bool:
        """Return whether this is still the gradient of its parameter, or was taken away for the step."""
        held = self.grad()
        if held is None or (grad is not None and grad is not held):
            return False
        return self.version is not None and self.version == _version(held)


class ClipTracker:
    """Measures gradients when they are about to be clipped for the first time since they were computed."""

    def __init__(self) -> None:
        self._pending: dict[int, _Clipped] = {}
        self._clipped: dict[int, _Clipped] = {}

    def before_clip(self, parameters: Sequence[Tensor]) -> None:
        """Measure those gradients that were not clipped yet."""
        self._pending = {}
        fresh = [p for p in parameters if p.grad is not None and self._known(p) is None]
        if not fresh:
            return
        found = measure_gradients(fresh)
        for i, p in enumerate(fresh):
            grad = p.grad
            assert grad is not None
            self._pending[id(p)] = _Clipped(weakref.ref(grad), None, found.norms[i], found.nonfinite.get(i, 0))

    def after_clip(self, parameters: Sequence[Tensor], event: ClipEvent) -> None:
        """Keep what was measured, with what was done."""
        self._clipped.update(self._pending)
        self._pending = {}
        present = [p for p in parameters if p.grad is not None]
        covered = frozenset(map(id, present))
        for p in present:
            if (clipped := self._clipped.get(id(p))) is not None:
                clipped.version = _version(p.grad)
                clipped.calls.append((event, covered))

    def take(self, parameters: Sequence[Tensor]) -> dict[int, _Clipped]:
        """Return and forget what is known of these parameters' gradients, by index."""
        found = {i: clipped for i, p in enumerate(parameters) if (clipped := self._known(p)) is not None}
        for p in parameters:
            self._clipped.pop(id(p), None)
        return found

    def _known(self, parameter: Tensor) -> _Clipped | None:
        clipped = self._clipped.get(id(parameter))
        return clipped if clipped is not None and clipped.is_about(parameter.grad) else None


def _version(grad: Any) -> int | None:
    """Return a number that changes with every write; None where torch keeps none (inference tensors)."""
    try:
        return int(grad._version) + (int(local_shard(grad)._version) if is_dtensor(grad) else 0)
    except RuntimeError:
        return None


def undo_clipping(
    measured: Measurement, clipped: dict[int, _Clipped], parameters: Sequence[Tensor], scale: float, known: bool
) -> dict[str, Any]:
    """Set the norms of a measurement to those before clipping, and return what clipping did, for the record.

    Args:
        measured: What was measured of the gradients as the optimizer gets them.
        clipped: What is known of those that were clipped, by index.
        parameters: All parameters of the optimizer.
        scale: What the gradients are still multiplied by.
        known: Whether all gradients are on this rank, and could be measured.
    """
    if not clipped:
        return {}
    after = measured.norm
    for i, one in clipped.items():
        measured.norms[i] = None if one.norm is None else one.norm / scale
        if one.nonfinite:
            measured.nonfinite[i] = one.nonfinite
    calls = _common_calls(clipped, parameters)
    measured.norm = _total(measured.norms) if known else _value(calls[0], clipped, parameters) if calls else None
    factor = _product([event.factor for event, _ in calls])
    if factor is None and known and after is not None and measured.norm is not None:
        factor = after / measured.norm if 0 < measured.norm < math.inf else 0.0 if after == 0 < measured.norm else 1.0
    limits = [event.max_norm for event, _ in calls]
    return {
        **({} if factor is None else {"clip": rounded([factor if factor < 1 - 1e-5 else 1.0])[0]}),
        **({"max_norm": min(limits)} if limits and None not in limits else {}),  # type: ignore[type-var]
    }


def _common_calls(clipped: dict[int, _Clipped], parameters: Sequence[Tensor]) -> list[tuple[ClipEvent, frozenset[int]]]:
    """Return the clippings that were applied to every gradient of the step; none where these were treated apart."""
    first, *others = [one.calls for one in clipped.values()]
    alike = all([id(e) for e, _ in calls] == [id(e) for e, _ in first] for calls in others)
    everything = all(i in clipped for i, p in enumerate(parameters) if p.grad is not None)
    return first if alike and everything else []


def _value(
    call: tuple[ClipEvent, frozenset[int]], clipped: dict[int, _Clipped], parameters: Sequence[Tensor]
) -> float | None:
    """Return the norm that a clipping function found, where it looked at exactly these gradients."""
    event, covered = call
    return event.norm() if covered == {id(parameters[i]) for i in clipped} else None


def _product(factors: list[Callable[[], float | None]]) -> float | None:
    found = [factor() for factor in factors]
    return math.prod(found) if found and None not in found else None  # type: ignore[arg-type]


def _total(norms: list[float | None]) -> float:
    known = [n for n in norms if n is not None]
    return math.nan if any(map(math.isnan, known)) else math.hypot(*known)


def remaining_scale(optimizer: torch.optim.Optimizer) -> float:
    """Return what the gradients are still multiplied by: a GradScaler leaves that division to a fused optimizer."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def refuse_flattened(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to clip shards that do not say what they are shards of.

    Raises:
        UnsupportedGradientError: (a NotImplementedError) parameters of torch's first FullyShardedDataParallel.
    """
    if any(is_flattened(p) for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedGradientError(
            "the parameters are flattened by FullyShardedDataParallel (FSDP1), whose shards do not say what they are "
            "shards of: each rank would clip by its own norm. Use its clip_grad_norm_, or fully_shard."
        )
