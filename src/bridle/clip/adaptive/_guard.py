from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._check import number
from .._decision import Policy, Scale, Skip, Stateful, check
from .._gradients import Gradients
from ._adaptive import count
from ._memory import Memory, State, check_kind, learned
from ._window import blank, push, quantile

__all__ = ["skip_spikes"]

_KIND = "skip_spikes"
_MAD_TO_SD = 1.4826  # of a normal distribution
_LEAST_SPREAD = 0.01  # of the median: values that hardly differ do not make a small rise a spike


class _SkipSpikes:
    def __init__(self, policy: Policy | None, z: float, window: int, warmup: int, at_most: int) -> None:
        self.policy, self.z, self.warmup, self.at_most = policy, z, warmup, at_most
        self._norms = Memory({"window": blank(window), "streak": torch.zeros((), dtype=torch.float64)})
        self._losses = Memory({"window": blank(window)})
        self._loss: Tensor | None = None
        self._loss_used_by: set[str] = set()

    @property
    def p(self) -> float:
        """The order of the norm it looks at."""
        return 2.0 if self.policy is None else self.policy.p

    def see(self, loss: Tensor | float) -> None:
        """Take the loss of the coming step into account. On several ranks: the same (reduced) loss on each.

        Raises:
            ArgumentError: (a ValueError) more than one number.
        """
        found = torch.as_tensor(loss).detach()
        if found.numel() != 1:
            raise ArgumentError(f"the loss is one number; found a tensor of shape {tuple(found.shape)}.")
        self._loss, self._loss_used_by = found.reshape(1), set()

    def check(self, grads: Gradients) -> None:
        """Refuse what the policy for calm steps refuses."""
        check(self.policy, grads)

    def decide(self, grads: Gradients) -> Skip:
        """Decide whether this step is a spike, and what else to do if not."""
        inner = Scale(torch.ones(())) if self.policy is None else self.policy.decide(grads)
        assert not isinstance(inner, Skip)
        with torch.no_grad():
            norm, keys = grads.total(self.p).reshape(1), [grads.label]
            state = self._norms.recall(keys, norm)
            finite = torch.isfinite(norm)
            spike = self._is_spike(state, norm) & finite
            if self._loss is not None and grads.label not in self._loss_used_by:
                spike = spike | self._loss_spikes(keys, self._loss.to(norm))
            # Not one that was let through ends a streak, only a calm step: or a change of level would cost
            # `at_most` steps again and again.
            streak = torch.where(spike, state["streak"] + 1, 0.0)
            after = {"window": push(state["window"], state["seen"], norm), "streak": streak}
            self._norms.keep(keys, learned(state, after, finite))
            return Skip((spike & (streak <= self.at_most)).reshape(()), inner)

    def _loss_spikes(self, keys: list[str], loss: Tensor) -> Tensor:
        state = self._losses.recall(keys, loss)
        finite = torch.isfinite(loss)
        spike = self._is_spike(state, loss) | finite.logical_not()
        after = {"window": push(state["window"], state["seen"], loss)}
        self._losses.keep(keys, learned(state, after, finite))
        self._loss_used_by.update(keys)
        return spike

    def _is_spike(self, state: State, value: Tensor) -> Tensor:
        window = state["window"]
        middle = quantile(window, 0.5)
        spread = _MAD_TO_SD * quantile((window - middle.unsqueeze(1)).abs(), 0.5)
        spread = torch.maximum(spread, _LEAST_SPREAD * middle.abs())
        return (value - middle > self.z * spread) & (state["seen"] >= self.warmup)

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, for a checkpoint: loads with `torch.load(..., weights_only=True)`."""
        inner = self.policy.state_dict() if isinstance(self.policy, Stateful) else None
        return {
            "policy": _KIND,
            "norms": self._norms.state_dict(),
            "losses": self._losses.state_dict(),
            "inner": inner,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The policy has to be built with the same settings.

        Raises:
            ArgumentError: (a ValueError) the state of another policy, or of one with other settings.
        """
        check_kind(saved, _KIND)
        if isinstance(self.policy, Stateful):
            self.policy.load_state_dict(saved["inner"] or {})
        self._norms.load_state_dict(saved["norms"])
        self._losses.load_state_dict(saved["losses"])

    def __repr__(self) -> str:
        return f"<{_KIND} z={self.z:g} warmup={self.warmup} at_most={self.at_most} policy={self.policy!r}>"


def skip_spikes(
    policy: Policy | None = None, z: float = 6.0, window: int = 128, *, warmup: int = 20, at_most: int = 5
) -> _SkipSpikes:
    """Skip a step whose norm, or loss, is an outlier; do what `policy` says with the others.

    A spike is a value with `(value - median) / (1.4826 MAD) > z` over the last values, where MAD is the median
    distance from the median: unlike mean and standard deviation, hardly moved by the spikes themselves. Tell it
    the loss with `see(loss)` before the step to have that watched as well; a loss that is not finite is a spike.
    After `at_most` spikes in a row steps are let through until one is calm: the level has changed. Skipping on
    spikes is done in OLMo 2 (arXiv 2501.00656) with mean and standard deviation.

    `clip_` skips by setting gradients to zero, which an optimizer with momentum or weight decay still moves on;
    `Clipper` leaves the optimizer without gradients where it can read the decision, so that nothing moves.

    Args:
        policy: what to do with a step that is no spike; None leaves it alone.
        z: how many robust standard deviations above the median are too many.
        window: how many values to remember.
        warmup: values to learn from before any step is skipped.
        at_most: how many spikes in a row to skip.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.skip_spikes(bridle.by_norm(1.5), warmup=4)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 1.2, 0.8, 2.0, 50.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = bridle.clip_([weight], policy)
        >>> report.skipped, weight.grad
        (True, tensor([0.]))
    """
    if isinstance(policy, _SkipSpikes):
        raise ArgumentError("skip_spikes was given another skip_spikes; one is enough.")
    if policy is not None and not isinstance(policy, Policy):
        raise ArgumentError(f"`policy` is a policy such as bridle.by_norm(1.0); found {policy!r:.80}.")
    return _SkipSpikes(
        policy, number(z, "z"), count(window, "window"), count(warmup, "warmup", 0), count(at_most, "at_most", 0)
    )
