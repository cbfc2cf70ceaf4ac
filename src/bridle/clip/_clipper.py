"""`Clipper`: clipping inside `optimizer.step()`, for people who want no extra line in their loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, get_args

import torch
from torch import Tensor

from ..distributed import PlacementSpec
from ..errors import ArgumentError
from ..policies import Policy, Stateful
from . import _apply
from ._clip import NonFinite, clip_
from ._parameters import Target
from ._report import ClipReport

__all__ = ["Clipper"]


class Clipper:
    """Clip the gradients of an optimizer at the start of each of its steps.

    With gradient accumulation that is once for each step, on the sum. With `torch.amp.GradScaler` no call to
    `unscale_` is needed: gradients are clipped after they are unscaled, and a step the scaler skips is neither
    clipped nor learned from. A closure passed to `step` is clipped each time it has been called.

    A step that is skipped, by `nonfinite="skip"` or by a policy such as `SkipSpikes`, leaves the optimizer without
    gradients, so that neither momentum nor weight decay moves a parameter. On an accelerator, where the decision
    cannot be read without waiting, gradients are set to zero instead.

    Args:
        optimizer: whose gradients to clip.
        policy: a policy, or a mapping from name patterns to policies, as for `bridle.clip_`.
        model: where the names for a mapping are taken from, if the optimizer was not built from
            `named_parameters()`.
        nonfinite: as for `bridle.clip_`.
        dry_run: change nothing; `report` says what would have been done.
        placement: where plain tensors are on other ranks, as for `bridle.clip_`.

    Raises:
        ArgumentError: (a ValueError) a wrong mode, or a parameter of the optimizer that `model` does not have.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> clipper = bridle.Clipper(optimizer, bridle.by_norm(1.0))
        >>> model(torch.tensor([[30.0, 40.0]])).sum().backward()
        >>> optimizer.step()
        >>> round(clipper.report.norm), round(clipper.report.norm_after, 6)
        (50, 1.0)
        >>> clipper.remove()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        policy: Policy | Mapping[str, Policy | None],
        *,
        model: torch.nn.Module | None = None,
        nonfinite: NonFinite = "raise",
        dry_run: bool = False,
        placement: PlacementSpec | None = None,
    ) -> None:
        if nonfinite not in get_args(NonFinite):
            raise ArgumentError(f"`nonfinite` is one of {', '.join(get_args(NonFinite))}; found {nonfinite!r}.")
        self.optimizer: Any = optimizer  # Any: torch hangs attributes on it that its type does not have
        self.policy = policy
        self.nonfinite: NonFinite = nonfinite
        self.dry_run = dry_run
        self.placement = placement
        self.report: ClipReport | None = None
        self._names = None if model is None else {id(p): name for name, p in model.named_parameters()}
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._target()  # refuses now what would fail in the first step
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Clip no more."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Clipper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """What the policies have learned, by pattern: loads with `torch.load(..., weights_only=True)`."""
        return {pattern: policy.state_dict() for pattern, policy in self._stateful().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Raises:
            ArgumentError: (a ValueError) the patterns or policies are not those that were saved.
        """
        policies = self._stateful()
        if set(policies) != set(saved):
            raise ArgumentError(
                f"the saved state is of the patterns {sorted(saved)}, this clipper has policies with a memory for "
                f"{sorted(policies)}. Build it as it was when it was saved."
            )
        for pattern, policy in policies.items():
            policy.load_state_dict(saved[pattern])

    def _stateful(self) -> dict[str, Stateful]:
        rules = self.policy if isinstance(self.policy, Mapping) else {"*": self.policy}
        return {pattern: rule for pattern, rule in rules.items() if isinstance(rule, Stateful)}

    def _target(self) -> Target:
        if self._names is None:
            return self.optimizer  # type: ignore[no-any-return]
        parameters = self._parameters()
        unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
        if unknown:
            raise ArgumentError(
                f"{len(unknown)} of the {len(parameters)} parameters of {type(self.optimizer).__name__} are not in "
                f"`model`, the first of shape {unknown[0]}. Pass the model the optimizer was built for."
            )
        return [(self._names[id(p)], p) for p in parameters]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _before_step(
        self,
        _: torch.optim.Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._taken = []  # of a step that raised
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._clipping(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
            return (args[0], self._clipping(args[1]), *args[2:]), kwargs
        self._clip()
        return None

    def _clipping(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._clip()
            return loss

        return evaluate

    def _clip(self) -> None:
        with torch.no_grad():
            driven = getattr(self.optimizer, "found_inf", None) is not None
            self._unscale()
            # A scaler that drives a fused optimizer has looked for such values, and makes it skip by itself.
            mode: NonFinite = "propagate" if driven else self.nonfinite
            self.report = clip_(
                self._target(), self.policy, nonfinite=mode, dry_run=self.dry_run, placement=self.placement
            )
            self._take_away(self.report._known_skips(self._parameters()))

    def _unscale(self) -> None:
        """Divide by the scale that a `GradScaler` has left to a fused optimizer: a policy looks at true gradients."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is None:
            return
        grads = {id(p.grad): p.grad for p in self._parameters()}
        _apply.scale_([g for g in grads.values() if g is not None], 1.0 / scale.double())
        self.optimizer.grad_scale = None

    def _take_away(self, parameters: list[Tensor]) -> None:
        """An optimizer leaves a parameter without a gradient alone. `_after_step` gives them back."""
        for p in parameters:
            if p.grad is not None:
                self._taken.append((p, p.grad))
                p.grad = None

    def _after_step(self, *_: Any) -> None:
        for parameter, grad in self._taken:
            if parameter.grad is None:  # a closure may have made a new one since
                parameter.grad = grad
        self._taken = []
