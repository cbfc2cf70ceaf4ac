"""`clip_`: measure, decide, apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError, NonFiniteGradientError
from . import _apply, _measure
from ._check import on_host
from ._decision import Clamp, Policy, Scale, Skip, check
from ._fingerprint import settings
from ._fold import check_fold, fold
from ._gradients import Gradients, measure_together
from ._groups import Groups
from ._notify import notify_clip_policy
from ._patterns import assign
from ._ranks import spans
from ._report import ClipReport, Outcome
from ._target import Target, named
from ._turn import turn

__all__ = ["NonFinite", "clip_"]

NonFinite: TypeAlias = Literal["raise", "skip", "zero", "propagate"]


@notify_clip_policy
def clip_(
    target: Target,
    policy: Policy | Mapping[str, Policy | None],
    *,
    nonfinite: NonFinite = "raise",
    fold_into: torch.optim.Optimizer | None = None,
    dry_run: bool = False,
    groups: Groups | None = None,
) -> ClipReport:
    """Clip gradients in place by a policy, and report what was done.

    No choice of arguments turns a finite gradient into a NaN or infinite one.

    Args:
        target: a module, an optimizer, `named_parameters()`, a dict, a tensor or an iterable of tensors.
        policy: such as `by_norm(1.0)`, or a mapping from name patterns to policies: the first pattern that matches
            a name wins, each group has its own norm, None leaves a group alone.
        nonfinite: what to do where a gradient holds NaN or infinite values. `"raise"` names them and changes
            nothing (it has to read one value from the device). `"skip"` sets every gradient of the target to zero.
            `"zero"` sets those values to zero and clips the rest. `"propagate"` leaves them for others to find;
            what shares a norm with them is left as it is, for there is no factor to scale it by.
        fold_into: a fused optimizer that multiplies by the coefficient (and skips) inside its own step, so that
            the gradients are not written here. Only for policies with one coefficient for all, such as `by_norm`.
        dry_run: change nothing and raise nothing about values: the report says what would have been done. A policy
            that adapts learns all the same.
        groups: what tensors cannot say about other ranks: `Stages`, `Sharded` or `Replicated`, several of them, or
            a mapping from name patterns to those. DTensors need none of it.

    Returns:
        A `ClipReport`; it reads from the device only when asked.

    Raises:
        NonFiniteGradientError: (a RuntimeError) a gradient is not finite and `nonfinite="raise"`.
        ArgumentError: (a ValueError) a pattern that is never used, a parameter no pattern matches, a wrong mode.
        FoldError: (a RuntimeError) `fold_into` an optimizer or with a policy that cannot do it.
        RankError: (a RuntimeError) ranks that passed different parameters, or one that is gone or late.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> report = bridle.clip_(model, {"1.*": bridle.by_norm(0.5), "*": bridle.by_norm(1.0)})
        >>> report.groups["1.*"].norm_after <= 0.5 + 1e-6
        True
    """
    if nonfinite not in get_args(NonFinite):
        raise ArgumentError(f"`nonfinite` is one of {', '.join(get_args(NonFinite))}; found {nonfinite!r}.")
    names, parameters = named(target)
    with turn(parameters if groups is not None or spans(parameters) else None):
        grads = Gradients.of(names, parameters, groups, lambda: f"clip_({settings(policy)}, {nonfinite=}, {dry_run=})")
        parts = assign(policy, grads)
        if fold_into is not None:
            check_fold(fold_into, parts, grads)
        return _clip(grads, parts, nonfinite, fold_into, dry_run)


def _clip(
    grads: Gradients,
    parts: list[tuple[str, Policy | None, Gradients]],
    nonfinite: NonFinite,
    fold_into: torch.optim.Optimizer | None,
    dry_run: bool,
) -> ClipReport:
    """Refuse, measure, decide, and only then write."""
    held = [
        (pattern, rule, part) for pattern, rule, part in parts if rule is not None and (part.tensors or grads.ranks)
    ]
    for _, rule, part in held:
        check(rule, part)
    if nonfinite == "skip":  # which is also for what no policy looks at
        _measure.check_kinds(g for _, rule, part in parts if rule is None for g in part.local)
    measure_together([(part, rule.p) for _, rule, part in held])
    bad, counts = _look_for_nonfinite([(rule, part) for _, rule, part in held], nonfinite, dry_run)
    skipped = bad if nonfinite == "skip" else False
    decided = [_decide(rule, part) for _, rule, part in held]
    if fold_into is not None and held and not dry_run:
        fold(fold_into, decided[0][0], skipped | decided[0][1])
    writes = fold_into is None and not dry_run
    outcomes = [
        _one(pattern, rule.p, part, decision, skip, writes and skipped is not True)
        for (pattern, rule, part), (decision, skip) in zip(held, decided, strict=True)
    ]
    if skipped is not False and writes:
        _apply.zero_(grads.local, skipped if isinstance(skipped, Tensor) else None)
    return ClipReport(outcomes, skipped, counts, dry_run)


def _decide(rule: Policy, part: Gradients) -> tuple[Scale | Clamp, bool | Tensor]:
    """What becomes of the gradients of a policy, and whether they are set to zero instead."""
    decision = rule.decide(part)
    if isinstance(decision, Skip):
        return decision.otherwise, bool(decision.when) if part.readable_now() else decision.when
    return decision, False


def _one(
    pattern: str, p: float, part: Gradients, decision: Scale | Clamp, skipped: bool | Tensor, writes: bool
) -> Outcome:
    """Do what was decided about the gradients of one policy."""
    before, summands = part.norms(p), part.summands(p)
    after = _carry_out(decision, part, p) if writes else _foresee(decision, part, p)
    if writes and skipped is not False:
        _apply.zero_(part.local, skipped if isinstance(skipped, Tensor) else None)
    return Outcome(pattern, p, part, before, summands, decision, after, skipped)


def _look_for_nonfinite(
    held: list[tuple[Policy, Gradients]], mode: NonFinite, dry_run: bool
) -> tuple[bool | Tensor, list[tuple[Gradients, Tensor]]]:
    """Is any norm not finite (a tensor where that would have to wait), and how many values of each gradient are not.

    The norms show it, so the usual finite step costs no further pass where values can be read.
    """
    if mode == "propagate" or not held:
        return False, []
    waits = not all(part.readable_now() for _, part in held)
    bad = _any_nonfinite(held)
    if (not waits or (mode == "raise" and not dry_run)) and not bool(bad):
        return False, []
    counts = [(part, part.count_nonfinite()) for _, part in held]
    if dry_run:
        return (bad if waits else True), counts
    if mode == "raise":
        raise _nonfinite(held, ClipReport([], False, counts).offenders)
    if mode == "zero":
        _zero_nonfinite(held, [part.values if waits else _with_any(part.values, n) for part, n in counts], waits)
    return (bad if waits else True), counts


def _any_nonfinite(held: list[tuple[Policy, Gradients]]) -> Tensor:
    totals = [part.total(rule.p) for rule, part in held]
    return torch.stack([torch.isfinite(each).to(totals[0].device) for each in totals]).all().logical_not()


def _with_any(values: list[Tensor], counts: Tensor) -> list[Tensor]:
    return [v for v, n in zip(values, counts.tolist(), strict=True) if n]


def _zero_nonfinite(held: list[tuple[Policy, Gradients]], sick: list[list[Tensor]], waits: bool) -> None:
    """Zero what is not finite and measure again; where even that is beyond float64, leave all as it was and raise."""
    copies = [[] if waits else _apply.stored_copies(values) for values in sick]
    for (_, part), values in zip(held, sick, strict=True):
        _apply.zero_nonfinite_(values)
        part.forget()
    measure_together([(part, rule.p) for rule, part in held])
    if not waits and bool(_any_nonfinite(held)):
        for values, kept in zip(sick, copies, strict=True):
            _apply.put_back_(values, kept)
        raise _nonfinite(held, {})
    for _, part in held:
        part.settle()


def _nonfinite(held: list[tuple[Policy, Gradients]], offenders: dict[str, int]) -> NonFiniteGradientError:
    if not offenders:
        why = held[0][1].why_not_finite()
        return NonFiniteGradientError(f'{why}. No gradient was changed. Pass nonfinite="skip" to zero the whole step.')
    found = f"{len(offenders)} gradient{'s are' if len(offenders) > 1 else ' is'} not finite: "
    return NonFiniteGradientError(
        f"{found}{_measure.list_offenders(offenders)}. No gradient was changed. "
        'Pass nonfinite="skip" to zero the whole step or "zero" to zero only those values.',
        offenders,
    )


def _foresee(decision: Scale | Clamp, part: Gradients, p: float) -> Tensor | None:
    """The norms after a decision that is not carried out, where they do not follow from it."""
    if isinstance(decision, Clamp) and not isinstance(decision.limit, float | Tensor):
        return _measure.norms(_apply.clamped(part.local, decision.limit), p)
    if isinstance(decision, Scale) and not isinstance(decision.by, Tensor):
        pairs = zip(part.local, decision.by, strict=True)
        return _measure.norms([g.detach() * factor for g, factor in pairs], p)
    return None


def _carry_out(decision: Scale | Clamp, part: Gradients, p: float) -> Tensor | None:
    """Change the gradients; their norms after, where they have to be measured. Under the limit nothing is written."""
    now = part.readable_now()
    if isinstance(decision, Clamp):
        if not isinstance(decision.limit, float | Tensor):
            _apply.clamp_each_(part.local, decision.limit)
            return _measure.norms(part.local, p)
        limit = on_host(decision.limit, "limit") if now else decision.limit
        if not now or bool((part.norms(p) > limit).any()):
            _apply.clamp_(part.values, limit)
            part.settle()
        return None
    return _scale(decision, part, p, now)


def _scale(decision: Scale, part: Gradients, p: float, now: bool) -> Tensor | None:
    by = decision.by
    if isinstance(by, Tensor):
        if not now:
            _apply.scale_(part.local, by)
        elif by.dim() == 0:
            if (factor := by.item()) != 1:
                _apply.scale_(part.local, factor)
        elif bool((by != 1).any()):
            _apply.scale_(part.local, by)
        return None
    _apply.scale_slices_(part.local, by)
    return _measure.norms(part.local, p)
