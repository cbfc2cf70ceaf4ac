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
from ..format.schema import Line
from .measure import measure_gradients
from .readback import Numbers, Values
from .shards import is_flattened, local_shard
from .writer import rounded


@dataclass
class Clipped:
    """A gradient that was clipped since it was computed.

    Attributes:
        grad: The gradient, by identity.
        version: Its version counter after the last clipping: while that stays, nobody has written to it since.
        norm: Its norm before the first, on its device; None where that could not be measured.
        nonfinite: How many of its values were NaN or infinite then; 0 where that was not counted.
        calls: The clippings, and to which gradients each was applied.
    """

    grad: weakref.ref[Tensor]
    version: int | None
    norm: Tensor | None
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
        self._pending: dict[int, Clipped] = {}
        self._clipped: dict[int, Clipped] = {}

    def before_clip(self, parameters: Sequence[Tensor]) -> None:
        """Measure those gradients that were not clipped yet."""
        self._pending = {}
        fresh = [p for p in parameters if p.grad is not None and self._known(p) is None]
        if not fresh:
            return
        gradients = measure_gradients(fresh)
        norms = dict(zip(gradients.indices, gradients.norms.unbind(), strict=True))
        for i, p in enumerate(fresh):
            grad = p.grad
            assert grad is not None
            self._pending[id(p)] = Clipped(weakref.ref(grad), None, norms.get(i), gradients.nonfinite.get(i, 0))

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

    def take(self, parameters: Sequence[Tensor]) -> dict[int, Clipped]:
        """Return and forget what is known of these parameters' gradients, by index."""
        taken = {i: clipped for i, p in enumerate(parameters) if (clipped := self._known(p)) is not None}
        for p in parameters:
            self._clipped.pop(id(p), None)
        return taken

    def _known(self, parameter: Tensor) -> Clipped | None:
        clipped = self._clipped.get(id(parameter))
        return clipped if clipped is not None and clipped.is_about(parameter.grad) else None


def _version(grad: Any) -> int | None:
    """Return a number that changes with every write; None where torch keeps none (inference tensors)."""
    try:
        return int(grad._version) + (int(local_shard(grad)._version) if is_dtensor(grad) else 0)
    except RuntimeError:
        return None


def restore_norms(
    clipped: dict[int, Clipped], parameters: Sequence[Tensor], complete: bool
) -> tuple[Values, Callable[[Numbers, list[float | None]], Line]]:
    """Return what to read, and a function that then sets norms to those before clipping and says what clipping did.

    That function takes the numbers and the norms by parameter, after clipping; it returns entries of the step's line.

    Args:
        clipped: What is known of gradients that were clipped, by index.
        parameters: All parameters of the optimizer.
        complete: Whether all gradients are on this rank, and could be measured.
    """
    calls = _common_calls(clipped, parameters)
    everything = {id(parameters[i]) for i in clipped}
    limits = [event.max_norm for event, _ in calls]
    values: Values = {
        "clipped": [one.norm for one in clipped.values() if one.norm is not None],
        "factors": _if_known([event.factor() for event, _ in calls]),
        "value": _if_known([event.norm() for event, covered in calls[:1] if covered == everything]),
    }

    def restore(numbers: Numbers, norms: list[float | None]) -> Line:
        after, before = _total(norms), iter(numbers["clipped"])
        for i, one in clipped.items():
            norms[i] = None if one.norm is None else next(before)
        norm = _total(norms) if complete else next(iter(numbers["value"]), None)
        line: Line = {"norm": rounded([norm], 9)[0], "peak": rounded([norm], 9)[0]}
        if not clipped:
            return line
        factor = math.prod(numbers["factors"]) if numbers["factors"] else math.nan
        if math.isnan(factor) and complete and norm is not None:
            factor = after / norm if 0 < norm < math.inf else 0.0 if after == 0 < norm else 1.0
        if not math.isnan(factor):
            line["clip"] = rounded([factor if factor < 1 - 1e-5 else 1.0])[0]
        if limits and None not in limits:
            line["max_norm"] = min(limits)  # type: ignore[type-var]
        return line

    return values, restore


def _common_calls(clipped: dict[int, Clipped], parameters: Sequence[Tensor]) -> list[tuple[ClipEvent, frozenset[int]]]:
    """Return the clippings that were applied to every gradient of the step; none where these were treated apart."""
    if not clipped:
        return []
    first, *others = [one.calls for one in clipped.values()]
    alike = all([id(e) for e, _ in calls] == [id(e) for e, _ in first] for calls in others)
    everything = all(i in clipped for i, p in enumerate(parameters) if p.grad is not None)
    return first if alike and everything else []


def _if_known(values: list[Tensor | None]) -> list[Tensor]:
    """Return the values if all are known, else none."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _total(norms: list[float | None]) -> float:
    known = [n for n in norms if n is not None]
    return math.nan if any(map(math.isnan, known)) else math.hypot(*known)


def remaining_scale(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what gradients are still multiplied by, if anything: a GradScaler leaves that to a fused optimizer."""
    scale = getattr(optimizer, "grad_scale", None)
    return [] if scale is None else [torch.as_tensor(scale)]


def unscaled(numbers: Numbers) -> Numbers:
    """Divide the norms by that."""
    for key in ("norms", "clipped", "value") if numbers["scale"] else ():
        numbers[key] = [n / numbers["scale"][0] for n in numbers[key]]
    return numbers


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
