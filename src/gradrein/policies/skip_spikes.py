import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _devices
from .._validate import count, number, one_number
from ..errors import ArgumentError
from .base import GradientView, Policy, Skip, check, is_stateful, refuse_no_policy
from .elements import ElementMemory
from .state import LearningPolicy, State, StateRows, accepted, finite
from .window import empty, median, middle, push

_MAD_TO_SD = 1.4826  # of a normal distribution
_LEAST_DEVIATION = 0.01  # of the median: where values hardly differ, a small rise is not a spike


@dataclass(eq=False)
class SkipSpikes(LearningPolicy):
    """Skip a step whose norm or loss is an outlier; apply `policy` to the others.

    A spike is a value with `(value - median) / (1.4826 MAD) > z` over the last values, where MAD is the median distance
    from the median; unlike mean and standard deviation, it hardly depends on the spikes themselves. `1.4826 MAD` counts
    as at least 1% of the median, so that a small rise is no spike where values hardly differ. Call `see(loss)`
    before the step to check the loss as well; a loss that is not finite is a spike. After `at_most` spikes in a row,
    steps are allowed until one is normal, because the level has changed. OLMo 2 (arXiv 2501.00656) skips spikes by
    mean and standard deviation.

    `clip_` skips by setting gradients to zero; an optimizer with momentum or weight decay still moves the weights.
    `Clipper` leaves the optimizer without gradients if it can read the decision, so that nothing moves.

    Args:
        policy: The policy for a step that is not a spike; None leaves it unclipped. It learns from every step.
        z: The threshold, in robust standard deviations above the median.
        window: The number of values to keep.
        warmup: The number of values to see before any step is skipped.
        at_most: The largest number of spikes in a row to skip.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range, or the inner policy itself skips steps.

    Examples:
        >>> policy = gradrein.policies.SkipSpikes(gradrein.by_norm(1.5), warmup=4)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 1.2, 0.8, 2.0, 50.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.skipped, weight.grad
        (True, tensor([0.]))

    See Also:
        [`gradrein.policies.Skip`][], [`gradrein.policies.ByZScore`][]
    """

    policy: Policy | None = None
    z: float = 6.0
    window: int = 128
    _: KW_ONLY
    warmup: int = 20
    at_most: int = 5

    def __post_init__(self) -> None:
        """Validate the arguments."""
        if isinstance(self.policy, SkipSpikes):
            raise ArgumentError("SkipSpikes was given another SkipSpikes; one is enough.")
        if self.policy is not None:
            refuse_no_policy(self.policy)
        self.z, self.window = number(self.z, "z"), count(self.window, "window")
        self.warmup, self.at_most = count(self.warmup, "warmup", 0), count(self.at_most, "at_most", 0)
        self._loss: Tensor | None = None
        self._loss_used_by: set[str] = set()

    def _new_memory(self) -> dict[str, StateRows | ElementMemory]:
        norms = {"window": empty(self.window), "streak": torch.zeros((), dtype=torch.float64)}
        return {"norms": StateRows(norms), "losses": StateRows({"window": empty(self.window)})}

    @property
    def p(self) -> float:
        """The order of the norm that the policy uses."""
        return 2.0 if self.policy is None else self.policy.p

    def see(self, loss: Tensor | float) -> None:
        """Check the loss of the coming step too. On several ranks, pass the same (reduced) loss on each.

        Raises:
            ArgumentError: (a ValueError) The loss is not one real number.
        """
        seen = one_number(loss, "see: the loss is one number, such as loss.detach()")
        self._loss, self._loss_used_by = seen.reshape(1), set()

    def compared_between_ranks(self, same_parameters: bool) -> dict[str, Any]:
        """Return the state that was loaded and the last loss, where it can be read without waiting for a device."""
        known = self._loss is not None and _devices.readable_now([self._loss])
        loss = {"see": f"{float(self._loss):.6g}"} if known and self._loss is not None else {}
        return super().compared_between_ranks(same_parameters) | loss

    def check(self, grads: GradientView) -> None:
        """Raise for what the policy for normal steps refuses."""
        check(self.policy, grads)

    def decide(self, grads: GradientView) -> Skip:
        """Decide whether this step is a spike, and what to do if it is not."""
        inner = None if self.policy is None else self.policy.decide(grads)
        if isinstance(inner, Skip):
            raise ArgumentError(f"SkipSpikes was given {self.policy!r:.80}, which skips by itself; one is enough.")
        with torch.no_grad():
            norm, keys = finite(grads.total_norm(self.p).reshape(1)), [grads.pattern]
            norms: StateRows = self._memory["norms"]
            state = norms.read(keys, norm)
            spike = self._is_spike(state, norm)
            if self._loss is not None and grads.pattern not in self._loss_used_by:
                spike = spike | self._loss_spikes(keys, self._loss.to(norm))
            # Only a normal step resets the streak; otherwise a level shift would skip `at_most` steps repeatedly.
            after = {"window": push(state["window"], norm), "streak": (state["streak"] + 1) * spike}
            norms.write(keys, accepted(state, after, norm == norm, guarded=False))  # NaN: not learned from
            return Skip((spike & (state["streak"] < self.at_most)).reshape(()), inner)

    def _loss_spikes(self, keys: list[str], loss: Tensor) -> Tensor:
        losses: StateRows = self._memory["losses"]
        state = losses.read(keys, loss)
        is_finite = loss.abs() < math.inf
        spike = self._is_spike(state, loss, signed=True) | is_finite.logical_not()
        losses.write(keys, accepted(state, {"window": push(state["window"], loss)}, is_finite, guarded=False))
        self._loss_used_by.update(keys)
        return spike

    def _is_spike(self, state: State, value: Tensor, *, signed: bool = False) -> Tensor:
        window, seen = state["window"], state["seen"]
        where = middle(seen, self.window)
        usual = median(window, where)
        mad = median((window - usual.unsqueeze(1)).abs_(), where)
        deviation = torch.maximum(mad, (usual.abs() if signed else usual) * (_LEAST_DEVIATION / _MAD_TO_SD))
        limit = torch.add(usual, deviation, alpha=self.z * _MAD_TO_SD)
        return (value > limit) & (seen >= self.warmup)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the policy for normal steps."""
        inner = self.policy.state_dict() if is_stateful(self.policy) else None  # type: ignore[union-attr]
        return {**super().state_dict(), "inner": inner}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state is from another policy, or from one with other settings.
        """
        before = self._memory, self._loaded
        super().load_state_dict(saved)
        try:
            if is_stateful(self.policy):
                self.policy.load_state_dict(saved.get("inner") or {})  # type: ignore[union-attr]
        except Exception:
            self._memory, self._loaded = before
            raise
