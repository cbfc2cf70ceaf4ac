"""`Clipper`: clip inside `optimizer.step()`, without an extra line in the loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from .._devices import accumulation_dtype
from .._torch.training import StepHook
from ..distributed import PlacementSpec
from ..errors import ArgumentError, ArgumentTypeError
from ..policies.base import is_stateful
from ..policies.named import Policies, build_all
from ..policies.state import check_is_state
from . import _apply
from ._clip import NonFinite, clip_
from ._report import ClipReport
from .target.layouts import placements_of
from .target.parameters import group_labels, named
from .target.patterns import check_policies, first_match, match_names

__all__ = ["Clipper"]


class Clipper:
    """Clip the gradients of an optimizer at the start of each of its steps.

    With gradient accumulation, the accumulated gradient is clipped once per step. With `torch.amp.GradScaler` no call
    to `unscale_` is needed: gradients are clipped after unscaling, and a step that the scaler skips is neither clipped
    nor used to adapt. With a closure, gradients are clipped each time it has run. A second clipper is refused while the
    first is attached, unless one of them is a dry run. So is a copy of the optimizer, which torch makes without hooks.

    A step that is skipped, by `nonfinite="skip"` or by a policy such as `SkipSpikes`, leaves the optimizer without
    gradients, so that neither momentum nor weight decay moves a parameter. On an accelerator, where the decision
    cannot be read without waiting, optimizers of torch with `fused=True` skip it by their `found_inf`, unless only some
    patterns of a mapping are skipped; for others gradients are set to zero, and momentum and decay go on.

    Args:
        optimizer: The optimizer whose gradients to clip.
        policy: A policy, its name, or a mapping from name patterns to those, as for `gradrein.clip_`.
        model: The model that provides the names for a mapping, if the optimizer was not built from
            `named_parameters()`. Patterns may then also be for parameters that the optimizer does not have.
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
        policy: Policies,
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
        self._check_target()
        others = [other for other in vars(optimizer).get("_gradrein_clippers", ()) if not (dry_run or other.dry_run)]
        if others and not self._beside_others:
            raise ArgumentError(
                f"this {type(optimizer).__name__} already has a clipper, {others[0]!r:.200}, and would be clipped "
                "twice in each step. Call `remove()` on it first, or build one Clipper with a mapping from name "
                "patterns to policies."
            )
        self._withheld: list[tuple[Tensor, Tensor]] = []
        self._sets_found_inf = False
        self._hook: StepHook | None = StepHook(optimizer, self._on_gradients, self._on_end)
        if not self._beside_others:
            vars(optimizer).setdefault("_gradrein_clippers", []).append(self)
            optimizer.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]  # copy and pickle look there first

    def __repr__(self) -> str:
        return f"Clipper({type(self.optimizer).__name__}, {self.policy!r}, nonfinite={self.nonfinite!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied."""
        return _refuse_copy(protocol)

    def remove(self) -> None:
        """Stop clipping."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            clippers = vars(self.optimizer).get("_gradrein_clippers", [])
            if self in clippers:
                clippers.remove(self)
                if not clippers:
                    del vars(self.optimizer)["_gradrein_clippers"], self.optimizer.__reduce_ex__

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

    def _stateful(self) -> dict[str, Any]:
        policies = self.policy if isinstance(self.policy, Mapping) else {"*": self.policy}
        return {pattern: policy for pattern, policy in policies.items() if is_stateful(policy)}

    def _target(self) -> Any:
        if self._names is None:
            return self.optimizer
        parameters = self._parameters()
        unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
        if unknown:
            raise ArgumentError(
                f"{len(unknown)} of the {len(parameters)} parameters of {type(self.optimizer).__name__} are not in "
                f"`model`, the first of shape {unknown[0]}. Pass the model the optimizer was built for."
            )
        known, groups = self._names, self.optimizer.param_groups
        return [{"params": g["params"], "param_names": [known[id(p)] for p in g["params"]]} for g in groups]

    def _check_target(self) -> None:
        """Refuse now what would fail in the first step."""
        check_policies(self.policy)
        names, parameters = named(self._target())
        if isinstance(self.policy, Mapping) and self._names is not None:
            here = {id(p) for p in parameters}
            elsewhere = {first_match(self.policy, name) for i, name in self._names.items() if i not in here}
            labels = group_labels(self._target()) or [""] * len(parameters)
            used = {first_match(self.policy, *each) for each in zip(names or (), labels, strict=True)}
            self.policy = {pattern: own for pattern, own in self.policy.items() if pattern not in elsewhere - used}
        if self.placement is not None:
            placements_of(self.placement, names, len(parameters))
        if isinstance(self.policy, Mapping):
            trainable = [p.requires_grad for p in parameters]
            match_names(self.policy, names, group_labels(self._target()), trainable, all_here=self.placement is None)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _on_gradients(self, again: bool) -> None:
        if not again:
            self._withheld = []  # of a step that raised
        self._drop_found_inf()
        optimizer: Any = self.optimizer  # torch hangs attributes on it that its type does not have
        # A GradScaler that drives the step has looked for values that are not finite itself.
        mode: NonFinite = self.nonfinite if getattr(optimizer, "found_inf", None) is None else "propagate"
        with torch.no_grad():
            if getattr(optimizer, "grad_scale", None) is not None:  # left to a fused optimizer, not to a policy
                scale = optimizer.grad_scale.to(accumulation_dtype(optimizer.grad_scale.device))
                grads = {id(p.grad): p.grad for p in self._parameters()}
                _apply.scale_([g for g in grads.values() if g is not None], 1.0 / scale)
                optimizer.grad_scale = None
            options: Any = {"nonfinite": mode, "dry_run": self.dry_run, "placement": self.placement}
            self.report = clip_(self._target(), self.policy, **options)
        # Take skipped gradients away: an optimizer leaves a parameter without a gradient alone.
        for p in self.report._known_skips(self._parameters()):
            if p.grad is not None:
                self._withheld.append((p, p.grad))
                p.grad = None
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not self.dry_run:
            self._skip_on_device(optimizer, self.report)

    def _skip_on_device(self, optimizer: Any, report: ClipReport) -> None:
        """Let a fused optimizer take a decision that is on a device from there, as from a GradScaler."""
        skip = report._skipped if isinstance(self.policy, Mapping) else report._is_skipped()
        if isinstance(skip, Tensor):
            found, skips = getattr(optimizer, "found_inf", None), skip.to(torch.float32)
            self._sets_found_inf = found is None
            optimizer.found_inf = skips if found is None else torch.maximum(found, skips)

    def _drop_found_inf(self) -> None:
        """Take away our own: it would look like that of a GradScaler, which takes its away itself."""
        if self._sets_found_inf:
            self._sets_found_inf = False
            del self.optimizer.found_inf  # type: ignore[attr-defined]

    def _on_end(self) -> None:
        self._drop_found_inf()
        for parameter, grad in self._withheld:
            if parameter.grad is None:  # a closure may have made a new one since
                parameter.grad = grad
        self._withheld = []


def _refuse_copy(protocol: Any) -> Any:  # noqa: ARG001  # the signature of `__reduce_ex__`
    raise ArgumentError(
        "torch copies and pickles an optimizer without its hooks, so that a copy would not be clipped. Copy it before "
        "you build the Clipper, or after `remove()`, and build one for the copy. To save, use `state_dict()`."
    )


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
