"""`Clipper`: clip inside `optimizer.step()`, without an extra line in the loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from ..distributed import PlacementSpec
from ..errors import ArgumentError, ArgumentTypeError
from ..policies import Stateful
from ..policies.named import Rules, build_all
from ..policies.state import check_is_state
from ._clip import NonFinite, clip_
from ._copy import attached, carry, drop, refuse_shallow
from ._report import ClipReport
from ._step import StepClipper
from .target.parameters import Target, named
from .target.patterns import check_names, check_policies, is_clipped
from .target.placement import placements_of

__all__ = ["Clipper"]


class Clipper:
    """Clip the gradients of an optimizer at the start of each of its steps.

    With gradient accumulation, the accumulated gradient is clipped once per step. With `torch.amp.GradScaler` no call
    to `unscale_` is needed: gradients are clipped after unscaling, and a step that the scaler skips is neither clipped
    nor used to adapt. With a closure, gradients are clipped each time it has run. A deep copy or pickle of the
    optimizer, or of the clipper, has its own clipper; a shallow copy is refused. So is a second clipper for the same
    parameters while the first is attached, unless one of them is a dry run.

    A step that is skipped, by `nonfinite="skip"` or by a policy such as `SkipSpikes`, leaves the optimizer without
    gradients, so that neither momentum nor weight decay moves a parameter. On an accelerator, where the decision
    cannot be read without waiting, gradients are set to zero instead.

    Args:
        optimizer: The optimizer whose gradients to clip.
        policy: A policy, its name, or a mapping from name patterns to those, as for `gradrein.clip_`.
        model: The model that provides the names for a mapping, if the optimizer was not built from
            `named_parameters()`.
        nonfinite: As for `gradrein.clip_`.
        dry_run: Change nothing; `report` says what would have been done.
        placement: How plain tensors are distributed over ranks, as for `gradrein.clip_`.

    Raises:
        ArgumentError: (a ValueError) Not an optimizer or a policy, an unknown mode, name patterns that do not match,
            a parameter of the optimizer that `model` does not have, or one that another clipper clips already.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> clipper = gradrein.Clipper(optimizer, gradrein.by_norm(1.0))
        >>> model(torch.tensor([[30.0, 40.0]])).sum().backward()
        >>> optimizer.step()
        >>> round(clipper.report.norm), round(clipper.report.norm_after, 6)
        (50, 1.0)
        >>> clipper.remove()

    See Also:
        [`gradrein.clip_`][], [`gradrein.policies.ByOvershoot`][], [`gradrein.Monitor`][]
    """

    _beside_others: ClassVar[bool] = False  # that of a Monitor limits what those of a script have clipped

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        policy: Rules,
        *,
        model: torch.nn.Module | None = None,
        nonfinite: NonFinite = "raise",
        dry_run: bool = False,
        placement: PlacementSpec | None = None,
    ) -> None:
        if nonfinite not in get_args(NonFinite):
            raise ArgumentError(f"`nonfinite` is one of {', '.join(get_args(NonFinite))}; found {nonfinite!r}.")
        _check_types(optimizer, model)
        self.optimizer = optimizer
        self.policy = build_all(policy)
        self.nonfinite: NonFinite = nonfinite
        self.dry_run = dry_run
        self.placement = placement
        self.report: ClipReport | None = None
        self._names = None if model is None else {id(p): name for name, p in model.named_parameters()}
        self._step: StepClipper | None = None
        self._check_target()
        self._refuse_second()
        self._attach(optimizer)

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._step = StepClipper(optimizer, self._clip)
        carry(optimizer, self)

    def __repr__(self) -> str:
        return f"Clipper({type(self.optimizer).__name__}, {self.policy!r}, nonfinite={self.nonfinite!r})"

    def remove(self) -> None:
        """Stop clipping."""
        if self._step is not None:
            self._step.remove()
            drop(self.optimizer, self)
            self._step = None

    def __copy__(self) -> Clipper:
        """Refuse: two clippers would share one optimizer."""
        raise refuse_shallow("a Clipper")

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs. A report is about the gradients of this process, and stays here."""
        names = self._names
        named = None if names is None else [(p, names[id(p)]) for p in self._parameters() if id(p) in names]
        own = {key: found for key, found in vars(self).items() if key not in ("report", "_names", "_step")}
        return {**own, "named": named, "attached": self._step is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of the original. The optimizer that is copied along attaches the copy to itself."""
        named, attached = state.pop("named"), state.pop("attached")
        vars(self).update(state, report=None)
        self._names = None if named is None else {id(p): name for p, name in named}
        if not attached:
            self._step = None

    def __enter__(self) -> Clipper:
        """Clip until the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clip no more."""
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the policies, by pattern. Load it with `torch.load(..., weights_only=True)`."""
        return {pattern: policy.state_dict() for pattern, policy in self._stateful().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises:
            ArgumentError: (a ValueError) The patterns or policies differ from those that were saved.
        """
        policies = self._stateful()
        check_is_state(saved, "a Clipper")
        if set(policies) != set(saved):
            raise ArgumentError(
                f"the saved state is for the patterns {sorted(map(str, saved))}, this clipper has policies with state "
                f"for {sorted(policies)}. Build it as it was when it was saved."
            )
        before = self.state_dict()
        try:
            for pattern, policy in policies.items():
                policy.load_state_dict(saved[pattern])
        except Exception:
            for pattern, policy in policies.items():  # none is loaded if one is refused
                policy.load_state_dict(before[pattern])
            raise

    def _stateful(self) -> dict[str, Stateful]:
        rules = self.policy if isinstance(self.policy, Mapping) else {"*": self.policy}
        return {pattern: rule for pattern, rule in rules.items() if isinstance(rule, Stateful)}

    def _target(self) -> Target:
        if self._names is None:
            return self.optimizer
        parameters = self._parameters()
        unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
        if unknown:
            raise ArgumentError(
                f"{len(unknown)} of the {len(parameters)} parameters of {type(self.optimizer).__name__} are not in "
                f"`model`, the first of shape {unknown[0]}. Pass the model the optimizer was built for."
            )
        return [(self._names[id(p)], p) for p in parameters]

    def _check_target(self) -> None:
        """Refuse now what would fail in the first step."""
        check_policies(self.policy)
        names, parameters = named(self._target())
        if self.placement is not None:
            placements_of(self.placement, names, len(parameters))
        trainable = [p.requires_grad for p in parameters]
        check_names(self.policy, names, trainable, all_here=self.placement is None)

    def _refuse_second(self) -> None:
        """Refuse to clip what another clipper of this optimizer changes in the same step."""
        for other in attached(self.optimizer, Clipper):
            both = self._clipped() & other._clipped()
            if both and not any(each.dry_run or each._beside_others for each in (self, other)):
                raise ArgumentError(
                    f"this {type(self.optimizer).__name__} already has a clipper, {other!r:.200}, for {len(both)} of "
                    "the same parameters, which would be clipped twice in each step. Call `remove()` on it first, or "
                    "build one Clipper with a mapping from name patterns to policies."
                )

    def _clipped(self) -> set[int]:
        """Return the parameters that it has a policy for."""
        names, parameters = named(self._target())
        if names is None or not isinstance(self.policy, Mapping):
            return set(map(id, parameters))
        return {id(p) for name, p in zip(names, parameters, strict=True) if is_clipped(self.policy, name)}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _clip(self, scaler_driven: bool) -> ClipReport:
        mode: NonFinite = "propagate" if scaler_driven else self.nonfinite
        self.report = clip_(self._target(), self.policy, nonfinite=mode, dry_run=self.dry_run, placement=self.placement)
        return self.report


def _check_types(optimizer: Any, model: Any) -> None:
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "register_step_pre_hook"):
        raise ArgumentTypeError(
            f"a Clipper needs an optimizer, found {type(optimizer).__name__}: {optimizer!r:.80}. Call "
            "gradrein.Clipper(optimizer, policy), with model=model for name patterns; gradrein.clip_ takes a module."
        )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"`model` is the module whose names a mapping uses, found {type(model).__name__}: {model!r:.80}. Call "
            "gradrein.Clipper(optimizer, policy, model=model)."
        )
