"""`clip_`: measure, decide, apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .. import _measure
from .._validate import read_threshold
from ..distributed import PlacementSpec
from ..errors import ArgumentError, NonFiniteGradientError
from ..policies import Clamp, Policy, Scale, Skip
from ..policies.base import check
from . import _apply
from ._describe import describe_policy
from ._fold import check_fold, fold
from ._gradients import Gradients, measure_together
from ._locks import one_at_a_time
from ._notify import notify_clip_policy
from ._parameters import Target, named
from ._patterns import assign
from ._report import ClipReport, Outcome
from ._sharded_norms import on_several_ranks

NonFinite: TypeAlias = Literal["raise", "skip", "zero", "propagate"]
_NONFINITE = get_args(NonFinite)  # here, since the compiler of older torch cannot trace the call


@notify_clip_policy
def clip_(
    target: Target,
    policy: Policy | Mapping[str, Policy | None],
    *,
    nonfinite: NonFinite = "raise",
    fold_into: torch.optim.Optimizer | None = None,
    dry_run: bool = False,
    placement: PlacementSpec | None = None,
) -> ClipReport:
    """Clip gradients in place by a policy, and report what was done.

    No choice of arguments turns a finite gradient into a NaN or infinite one.

    Args:
        target: A module, an optimizer, `named_parameters()`, a dict, a tensor or an iterable of tensors.
        policy: Such as `by_norm(1.0)`, or a mapping from name patterns to policies: the first pattern that matches
            a name wins, each group has its own norm, None leaves a group alone.
        nonfinite: What to do where a gradient holds NaN or infinite values. `"raise"` names them and changes
            nothing (it has to read one value from the device). `"skip"` sets every gradient of the target to zero.
            `"zero"` sets those values to zero and clips the rest. `"propagate"` leaves them in place, and leaves
            gradients that share a norm with them as they are, for there is no factor to scale them by.
        fold_into: A fused optimizer that multiplies by the coefficient (and skips) inside its own step, so that
            the gradients are not written here. Only for policies with one coefficient for all, such as `by_norm`.
        dry_run: Change nothing and raise nothing about values: the report says what would have been done. A policy
            that adapts learns all the same.
        placement: Where plain tensors are on other ranks: `Disjoint`, `Sharded` or `Replicated` of
            `bridle.distributed`, several of them, or a mapping from name patterns to those. DTensors need none.

    Returns:
        A `ClipReport`; it reads from the device only when a property is used.

    Raises:
        NonFiniteGradientError: (a RuntimeError) A gradient is not finite and `nonfinite="raise"`.
        ArgumentError: (a ValueError) An unused pattern, a parameter that no pattern matches, an unknown mode.
        FoldError: (a RuntimeError) The optimizer or the policy cannot be folded.
        RankError: (a RuntimeError) Ranks passed different parameters, or one is gone or late.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> report = bridle.clip_(model, {"1.*": bridle.by_norm(0.5), "*": bridle.by_norm(1.0)})
        >>> report.by_pattern["1.*"].norm_after <= 0.5 + 1e-6
        True
    """
    if nonfinite not in _NONFINITE:
        raise ArgumentError(f"`nonfinite` is one of {', '.join(_NONFINITE)}; found {nonfinite!r}.")
    names, parameters = named(target)
    with one_at_a_time(parameters if placement is not None or on_several_ranks(parameters) else None):
        call = lambda: f"clip_({describe_policy(policy)}, {nonfinite=}, {dry_run=})"  # noqa: E731
        grads = Gradients.of(names, parameters, placement, call)
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
    active = [
        (pattern, rule, part) for pattern, rule, part in parts if rule is not None and (part.tensors or grads.sharded)
    ]
    for _, rule, part in active:
        check(rule, part)
    if nonfinite == "skip":  # which also zeroes gradients without a policy
        _measure.check_kinds(g for _, rule, part in parts if rule is None for g in part.local)
    measure_together([(part, rule.p) for _, rule, part in active])
    bad, counts = _find_nonfinite([(rule, part) for _, rule, part in active], nonfinite, dry_run)
    skipped = bad if nonfinite == "skip" else False
    decided = [_decide(rule, part) for _, rule, part in active]
    if fold_into is not None and active and not dry_run:
        fold(fold_into, decided[0][0], skipped | decided[0][1])
    writes = fold_into is None and not dry_run
    outcomes = [
        _clip_group(pattern, rule.p, part, decision, skip, writes and skipped is not True)
        for (pattern, rule, part), (decision, skip) in zip(active, decided, strict=True)
    ]
    if skipped is not False and writes:
        _apply.zero_(grads.local, skipped if isinstance(skipped, Tensor) else None)
    return ClipReport(outcomes, skipped, counts, dry_run)


def _decide(rule: Policy, part: Gradients) -> tuple[Scale | Clamp, bool | Tensor]:
    """Return what to do with the gradients of a policy, and whether to set them to zero instead."""
    decision = rule.decide(part)
    if isinstance(decision, Skip):
        return decision.otherwise, bool(decision.when) if part.readable_now() else decision.when
    return decision, False


def _clip_group(
    pattern: str, p: float, part: Gradients, decision: Scale | Clamp, skipped: bool | Tensor, writes: bool
) -> Outcome:
    """Apply the decision of one policy to its gradients."""
    before, terms = part.norms(p), part.norm_terms(p)
    after = _apply_decision(decision, part, p) if writes else _predict_norms(decision, part, p)
    if writes and skipped is not False:
        _apply.zero_(part.local, skipped if isinstance(skipped, Tensor) else None)
    return Outcome(pattern, p, part, before, terms, decision, after, skipped)


def _find_nonfinite(
    active: list[tuple[Policy, Gradients]], mode: NonFinite, dry_run: bool
) -> tuple[bool | Tensor, list[tuple[Gradients, Tensor]]]:
    """Return whether any norm is not finite (a tensor where reading it would wait), and the counts for each gradient.

    The norms tell, so the usual finite step costs no further pass where values can be read.
    """
    if mode == "propagate" or not active:
        return False, []
    waits = not all(part.readable_now() for _, part in active)
    bad = _any_nonfinite(active)
    if (not waits or (mode == "raise" and not dry_run)) and not bool(bad):
        return False, []
    counts = [(part, part.count_nonfinite()) for _, part in active]
    if dry_run:
        return (bad if waits else True), counts
    if mode == "raise":
        raise _nonfinite(active, ClipReport([], False, counts).offenders)
    if mode == "zero":
        _zero_nonfinite(active, [part.values if waits else _with_any(part.values, n) for part, n in counts], waits)
    return (bad if waits else True), counts


def _any_nonfinite(active: list[tuple[Policy, Gradients]]) -> Tensor:
    totals = [part.total_norm(rule.p) for rule, part in active]
    return torch.stack([torch.isfinite(each).to(totals[0].device) for each in totals]).all().logical_not()


def _with_any(values: list[Tensor], counts: Tensor) -> list[Tensor]:
    return [v for v, n in zip(values, counts.tolist(), strict=True) if n]


def _zero_nonfinite(active: list[tuple[Policy, Gradients]], offending: list[list[Tensor]], waits: bool) -> None:
    """Zero what is not finite and measure again; restore and raise where even that norm exceeds float64."""
    copies = [[] if waits else _apply.stored_copies(values) for values in offending]
    for (_, part), values in zip(active, offending, strict=True):
        _apply.zero_nonfinite_(values)
        part.invalidate()
    measure_together([(part, rule.p) for rule, part in active])
    if not waits and bool(_any_nonfinite(active)):
        for values, kept in zip(offending, copies, strict=True):
            _apply.restore_(values, kept)
        raise _nonfinite(active, {})
    for _, part in active:
        part.write_back_partial()


def _nonfinite(active: list[tuple[Policy, Gradients]], offenders: dict[str, int]) -> NonFiniteGradientError:
    if not offenders:
        why = active[0][1].why_not_finite()
        return NonFiniteGradientError(f'{why}. No gradient was changed. Pass nonfinite="skip" to zero the whole step.')
    found = f"{len(offenders)} gradient{'s are' if len(offenders) > 1 else ' is'} not finite: "
    return NonFiniteGradientError(
        f"{found}{_measure.list_offenders(offenders)}. No gradient was changed. "
        'Pass nonfinite="skip" to zero the whole step or "zero" to zero only those values.',
        offenders,
    )


def _predict_norms(decision: Scale | Clamp, part: Gradients, p: float) -> Tensor | None:
    """Return the norms after a decision that is not applied, where they do not follow from it."""
    if isinstance(decision, Clamp) and not isinstance(decision.limit, float | Tensor):
        return _measure.norms(_apply.clamped(part.local, decision.limit), p)
    if isinstance(decision, Scale) and not isinstance(decision.by, Tensor):
        pairs = zip(part.local, decision.by, strict=True)
        return _measure.norms([g.detach() * factor for g, factor in pairs], p)
    return None


def _apply_decision(decision: Scale | Clamp, part: Gradients, p: float) -> Tensor | None:
    """Change the gradients. Return their norms where they have to be measured. Below the limit nothing is written."""
    now = part.readable_now()
    if isinstance(decision, Clamp):
        if not isinstance(decision.limit, float | Tensor):
            _apply.clamp_each_(part.local, decision.limit)
            return _measure.norms(part.local, p)
        limit = read_threshold(decision.limit, "limit") if now else decision.limit
        if not now or bool((part.norms(p) > limit).any()):
            _apply.clamp_(part.values, limit)
            part.write_back_partial()
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
