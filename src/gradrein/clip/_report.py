"""What a call to `clip_` did. Nothing is read from a device until someone asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _measure
from .._events import ClipEvent
from .._notebook import bars, card
from ..errors import ArgumentError
from ..policies import Clamp, Scale
from ._gradients import Gradients


@dataclass(frozen=True)
class Outcome:
    """What one policy did to the gradients it was for.

    Attributes:
        p: the order of the norms.
        grads: the gradients, for their names.
        before: the norm of each before.
        terms: per-gradient norms plus the contribution of other ranks; their p-norm is the total.
        decision: what the policy decided.
        measured_after: the norm of each after, where it does not follow from the decision.
        skipped: whether they were set to zero instead.
    """

    p: float
    grads: Gradients
    before: Tensor
    terms: Tensor
    decision: Scale | Clamp
    measured_after: Tensor | None
    skipped: bool | Tensor = False

    def after(self) -> Tensor:
        """Return the norm of each gradient after."""
        if bool(self.skipped):
            return torch.zeros_like(self.before)
        if self.measured_after is not None:
            return self.measured_after
        if isinstance(self.decision, Clamp):  # p is infinite here: the norm is the largest magnitude
            limit = torch.as_tensor(self.decision.limit, dtype=self.before.dtype, device=self.before.device)
            most = self.before.new_tensor([torch.finfo(g.dtype).max for g in self.grads.tensors])
            return self.before.clamp(max=torch.where(limit < math.inf, torch.minimum(limit, most), limit))
        assert isinstance(self.decision.by, Tensor)
        return self.before * self.decision.by

    def terms_after(self) -> Tensor:
        """Return terms whose p-norm is that of all gradients after."""
        if self.terms is self.before:
            return self.after()
        if isinstance(self.decision, Clamp):
            limit = torch.as_tensor(self.decision.limit, dtype=self.terms.dtype, device=self.terms.device)
            return self.terms.clamp(max=limit)
        if isinstance(self.decision.by, Tensor) and self.decision.by.dim() == 0:
            return self.terms * self.decision.by
        raise ArgumentError(
            "other ranks clipped their gradients by factors that are not known on this rank: see "
            "`norms_after` for the gradients of this rank."
        )

    def factor(self) -> float | None:
        """Return the smallest factor used; None for a clamp, which has none, and where other ranks have others."""
        if isinstance(self.decision, Clamp):
            return None
        by = self.decision.by
        if not isinstance(by, Tensor) and self.grads.is_split:
            return None
        each = [by] if isinstance(by, Tensor) else by
        return min((float(f.amin()) for f in each if f.numel()), default=1.0)

    def clipped(self) -> bool:
        """Return whether anything was changed."""
        if isinstance(self.decision, Clamp) or (self.measured_after is not None and self.grads.is_split):
            return bool(((self.after() < self.before) | self.before.isnan()).any())
        by = self.decision.by
        return any(bool((f != 1).any()) for f in ([by] if isinstance(by, Tensor) else by))


class ClipReport:
    """What a call to `clip_` did.

    Values are read from the device when you access a property, not before.

    Examples:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> report = gradrein.clip_(model, gradrein.by_norm(1.0))
        >>> report.norm, report.norm_after, report.coefficient, report.clipped
        (5.0, 1.0, 0.2, True)
        >>> print(report)
        clipped: norm 5 -> 1, coefficient 0.2
          weight  5 -> 1

    See Also:
        [`gradrein.clip_`][], [`gradrein.Clipper`][]
    """

    def __init__(
        self,
        outcomes: list[Outcome],
        skipped: bool | Tensor,
        counts: list[tuple[Gradients, Callable[[], Tensor]]],
        dry_run: bool = False,
    ) -> None:
        self._outcomes = outcomes
        self._skipped = skipped
        self._counts = counts
        self._dry_run = dry_run

    def _total(self, after: bool) -> Tensor:
        if not self._outcomes:
            return torch.zeros(())
        orders = {o.p for o in self._outcomes}
        if len(orders) > 1:
            raise ArgumentError(
                f"the groups were measured by norms of different order {orders}: see `report.by_pattern`."
            )
        if after and self.skipped:
            return torch.zeros(())
        home = self._outcomes[0].before.device
        each = torch.cat([(o.terms_after() if after else o.terms).to(home) for o in self._outcomes])
        return _measure.total(each, orders.pop())

    @property
    def norm(self) -> float:
        """The norm of all gradients before clipping, in the policy's order (for `by_value`: the largest magnitude)."""
        return float(self._total(after=False))

    @property
    def norm_after(self) -> float:
        """The norm after clipping."""
        return float(self._total(after=True))

    @property
    def coefficient(self) -> float | None:
        """The smallest factor that gradients were multiplied by; None if only values were limited.

        Also None if parts of sharded gradients have their own factors (`by_unit`), which differ between ranks.
        """
        factors = [f for o in self._outcomes if (f := o.factor()) is not None]
        return min(factors) if factors else None if self._outcomes else 1.0

    @property
    def clipped(self) -> bool:
        """Whether any gradient was changed by a policy; of a limit on values also where NaN hides whether any was."""
        return any(o.clipped() for o in self._outcomes)

    @property
    def skipped(self) -> bool:
        """Whether all gradients were set to zero, because some were not finite or by a policy such as `SkipSpikes`."""
        return bool(self._is_skipped())

    def _is_skipped(self) -> bool | Tensor:
        """Return the same without reading it."""
        flags = [o.skipped for o in self._outcomes]
        if self._skipped is True or (flags and all(flag is True for flag in flags)):
            return True
        if not flags or any(flag is False for flag in flags):
            return self._skipped
        home = self._outcomes[0].before.device
        every = torch.stack([torch.as_tensor(flag, device=home) for flag in flags]).all()
        return every if self._skipped is False else every | self._skipped

    @property
    def dry_run(self) -> bool:
        """Whether this was a dry run: nothing was changed, and the report says what would have been done."""
        return self._dry_run

    @property
    def norms(self) -> dict[str, float]:
        """The norm of each gradient before clipping, by parameter name."""
        return {name: n for o in self._outcomes for name, n in zip(o.grads.names(), o.before.tolist(), strict=True)}

    @property
    def norms_after(self) -> dict[str, float]:
        """The norm of each gradient after clipping, by parameter name."""
        skipped = self.skipped
        pairs = ((o.grads.names(), o.after().tolist()) for o in self._outcomes)
        return {name: 0.0 if skipped else n for names, each in pairs for name, n in zip(names, each, strict=True)}

    @property
    def offenders(self) -> dict[str, int]:
        """The parameters whose gradients had NaN or infinite values, and how many."""
        pairs = ((g.names(), counted().tolist()) for g, counted in self._counts)
        return {name: int(n) for names, counts in pairs for name, n in zip(names, counts, strict=True) if n}

    @property
    def by_pattern(self) -> dict[str, ClipReport]:
        """A report for each name pattern."""
        return {o.grads.pattern: ClipReport([o], self._skipped, [], self._dry_run) for o in self._outcomes}

    def _known_skips(self, everything: list[Tensor]) -> list[Tensor]:
        """Return the parameters of `everything` whose gradients were set to zero, as far as known without waiting."""
        if self._dry_run:
            return []
        if self._skipped is True:
            return everything
        return [p for o in self._outcomes if o.skipped is True for p in o.grads.parameters]

    def worst(self, k: int = 5) -> list[tuple[str, float]]:
        """Return the k parameters with the largest norm before clipping, non-finite ones first."""
        size = lambda item: math.inf if math.isnan(item[1]) else item[1]  # noqa: E731
        return sorted(self.norms.items(), key=size, reverse=True)[:k]

    def __str__(self) -> str:
        if not self._outcomes:
            return "nothing to clip: no gradient"
        if len(self._outcomes) > 1:
            indented = (f"{pattern}: {report}".replace("\n", "\n  ") for pattern, report in self.by_pattern.items())
            return "\n".join(indented)
        return "\n".join([self._headline(), *self._lines()])

    def _headline(self) -> str:
        note = f"; not finite: {_measure.list_offenders(self.offenders)}" if self.offenders else ""
        if self._dry_run:
            note += " (dry run: nothing was changed)"
        if self.skipped:
            return f"skipped: all gradients set to zero{note}"
        if not self.clipped:
            return f"not clipped: norm {self.norm:.4g}{note}"
        factor = "" if self.coefficient is None else f", coefficient {self.coefficient:.4g}"
        return f"clipped: norm {self.norm:.4g} -> {self.norm_after:.4g}{factor}{note}"

    def _lines(self) -> list[str]:
        after, worst = self.norms_after, self.worst()
        width = max((len(name) for name, _ in worst), default=0)
        lines = [f"  {name:<{width}}  {n:.4g} -> {after[name]:.4g}" for name, n in worst]
        more = sum(len(o.grads.tensors) for o in self._outcomes) - len(worst)
        return [*lines, f"  and {more} more"] if more else lines

    def _repr_html_(self) -> str:
        title = self._headline() if len(self._outcomes) == 1 else "" if self._outcomes else str(self)
        return card(title, bars(self.norms, self.norms_after), str(self) if len(self._outcomes) > 1 else "")

    def __repr__(self) -> str:
        text = self._headline() if self._outcomes else str(self)
        return f"<ClipReport {text}>"


def describe_report(arguments: dict[str, Any], report: ClipReport) -> ClipEvent | None:
    """Describe a call of `clip_` to those who watch."""
    if report.dry_run:
        return None
    outcomes, policy = report._outcomes, arguments["policy"]
    # What is left alone has another factor, and a norm that was not measured.
    whole = not isinstance(policy, Mapping) or None not in policy.values()
    single = whole and all(map(_has_one_factor, outcomes))
    max_norm = getattr(policy, "max_norm", None)

    def factor() -> Tensor | None:
        skipped = report._is_skipped()
        by: Any = outcomes[0].decision.by if single and len(outcomes) == 1 else math.nan  # type: ignore[union-attr]
        if isinstance(skipped, Tensor):
            return torch.where(skipped, 0.0, by)
        return torch.as_tensor(0.0 if skipped else by)

    return ClipEvent(
        max_norm if single and isinstance(max_norm, float) else None,
        lambda: report._total(after=False) if whole and {outcome.p for outcome in outcomes} == {2.0} else None,
        factor,
    )


def _has_one_factor(outcome: Outcome) -> bool:
    decision = outcome.decision
    return isinstance(decision, Scale) and isinstance(decision.by, Tensor) and decision.by.dim() == 0
