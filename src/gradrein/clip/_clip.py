"""`clip_`: measure, decide, apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .. import _measure
from .._devices import has_no_values
from .._events import notify_clip
from .._validate import read_threshold
from ..distributed import PlacementSpec
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    GradreinError,
    NonFiniteGradientError,
    UnsupportedGradientError,
)
from ..policies import Clamp, Policy, Scale, Skip
from ..policies.base import check
from . import _apply
from ._gate import enter
from ._gradients import Gradients, measure_together, require_same_places
from ._report import ClipReport, Outcome, describe_report
from .target.describe import describe_policy, is_ours
from .target.parameters import Target, parameters_of
from .target.patterns import assign, check_policies

NonFinite: TypeAlias = Literal["raise", "skip", "zero", "propagate"]
_LARGEST = torch.finfo(torch.float32).max
_NONFINITE = get_args(NonFinite)  # here, since the compiler of older torch cannot trace the call


@notify_clip(parameters_of, describe_report)
def clip_(
    target: Target,
    policy: Policy | Mapping[str, Policy | None],
    *,
    nonfinite: NonFinite = "raise",
    dry_run: bool = False,
    placement: PlacementSpec | None = None,
) -> ClipReport:
    """Clip gradients in place by a policy, and report what was done.

    No choice of arguments turns a finite gradient into a NaN or infinite one.

    Args:
        target: A module, an optimizer, `named_parameters()`, a dict, a tensor or an iterable of tensors.
        policy: A policy such as `by_norm(1.0)`, or a mapping from name patterns to policies. The first pattern that
            matches a name wins, each group has its own norm, and None leaves a group unchanged. Build a policy that
            learns once, before the loop.
        nonfinite: What to do if a gradient has NaN or infinite values. `"raise"` raises an error that names them and
            changes nothing (it has to read one value from the device). `"skip"` sets every gradient of the target to
            zero. `"zero"` sets those values to zero and clips the rest. `"propagate"` does not check: gradients that
            share a norm with a non-finite one stay unchanged, because there is no factor to scale them by; a limit on
            each value, as in `by_value`, applies to infinite values too and leaves NaN, as `clip_grad_value_` does.
        dry_run: Change nothing and raise nothing about values: the report says what would have been done. Adaptive
            policies update their state as usual.
        placement: How plain tensors are distributed over ranks: `Disjoint`, `Sharded` or `Replicated` of
            `gradrein.distributed`, several of them, or a mapping from name patterns to those. Not needed for DTensors.

    Returns:
        A `ClipReport`; it reads from the device only when a property is used.

    Raises:
        NonFiniteGradientError: (a RuntimeError) A gradient is not finite and `nonfinite="raise"`.
        ArgumentError: (a ValueError) An unused pattern, a parameter that no pattern matches, or an unknown mode.
        RankError: (a RuntimeError) Ranks passed different parameters, or one of them exited or timed out.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> report = gradrein.clip_(model, {"1.*": gradrein.by_norm(0.5), "*": gradrein.by_norm(1.0)})
        >>> report.by_pattern["1.*"].norm_after <= 0.5 + 1e-6
        True

    See Also:
        [`gradrein.Clipper`][], [`gradrein.by_norm`][], [`gradrein.policies.Policy`][],
        [`gradrein.distributed.Placement`][]
    """
    if nonfinite not in _NONFINITE:
        raise ArgumentError(f"`nonfinite` is one of {', '.join(_NONFINITE)}; found {nonfinite!r}.")

    def call() -> str:
        check_policies(policy)
        return f"clip_({describe_policy(policy, placement is None)}, {nonfinite=}, {dry_run=})"

    grads = enter(target, placement, call)
    return _clip(grads, assign(policy, grads), nonfinite, dry_run)


def _clip(
    grads: Gradients, parts: list[tuple[str, Policy | None, Gradients]], nonfinite: NonFinite, dry_run: bool
) -> ClipReport:
    """Refuse, measure, decide, and only then write."""
    active = [(pattern, rule, part) for pattern, rule, part in parts if rule is not None]
    active = [each for each in active if each[2].tensors or grads.has_others]
    for _, rule, part in active:
        check(rule, part)
        if nonfinite == "zero":
            part.refuse_shared_elements()
    if nonfinite == "skip":  # which also zeroes gradients without a policy
        _measure.check_kinds(g for _, rule, part in parts if rule is None for g in part.local)
    if active or grads.is_split:
        measure_together([(part, rule.p) for _, rule, part in active] or [(grads, 2.0)])
    bad, counts = _find_nonfinite([(rule, part) for _, rule, part in active], nonfinite, dry_run)
    skipped = bad if nonfinite == "skip" else False
    decided = [_decide(rule, part) for _, rule, part in active]
    looked = nonfinite != "propagate" and not dry_run  # so that no norm is NaN any more
    writes_now = not dry_run and skipped is not True
    # Norms are exchanged before anything is written.
    expected = [
        _predict_norms(decision, part, rule.p) if part.is_split or not writes_now else None
        for (_, rule, part), (decision, _) in zip(active, decided, strict=True)
    ]
    outcomes = [
        _clip_group(pattern, rule.p, part, decision, skip, after, writes_now, looked)
        for (pattern, rule, part), (decision, skip), after in zip(active, decided, expected, strict=True)
    ]
    if skipped is not False and not dry_run:
        _apply.zero_(grads.local, skipped if isinstance(skipped, Tensor) else None)
    return ClipReport(outcomes, skipped, counts, dry_run)


def _decide(rule: Policy, part: Gradients) -> tuple[Scale | Clamp, bool | Tensor]:
    """Return what to do with the gradients of a policy, and whether to set them to zero instead."""
    decision = rule.decide(part)
    if not isinstance(decision, (Scale, Clamp, Skip)):
        raise ArgumentTypeError(
            f"a policy must return Scale, Clamp or Skip of gradrein.policies; {type(rule).__name__} returned "
            f"{type(decision).__name__}: {decision!r:.80}. No gradient was changed."
        )
    if isinstance(decision, Scale) and isinstance(decision.by, Tensor) and not (is_ours(rule) or part.readable_now()):
        decision = Scale(decision.by.clamp(max=_LARGEST))  # so that it makes nothing infinite where it cannot be read
    if isinstance(decision, Skip):
        return decision.otherwise, bool(decision.when) if part.readable_now() else decision.when
    return decision, False


def _clip_group(
    pattern: str,
    p: float,
    part: Gradients,
    decision: Scale | Clamp,
    skipped: bool | Tensor,
    after: Tensor | None,
    writes: bool,
    looked: bool,
) -> Outcome:
    """Apply the decision of one policy to its gradients."""
    before, terms = part.norms(p), part.norm_terms(p)
    beside_nan = False if looked else _limits_beside_nan(decision, part, before)
    if writes:
        measured = _apply_decision(decision, part, p)
        after = measured if after is None else after
    if writes and skipped is not False:
        _apply.zero_(part.local, skipped if isinstance(skipped, Tensor) else None)
    return Outcome(pattern, p, part, before, terms, decision, after, skipped, beside_nan)


def _limits_beside_nan(decision: Scale | Clamp, part: Gradients, norms: Tensor) -> bool | Tensor | None:
    """Return whether a gradient with a NaN also holds values above the limit; None if it cannot be read."""
    if not isinstance(decision, Clamp) or not isinstance(decision.limit, float | Tensor):
        return False
    if not part.readable_now():
        return None
    values = [v for v, norm in zip(part.values, norms.tolist(), strict=True) if math.isnan(norm)]
    return _measure.any_above(values, decision.limit) if values else False


def _find_nonfinite(
    active: list[tuple[Policy, Gradients]], mode: NonFinite, dry_run: bool
) -> tuple[bool | Tensor, list[tuple[Gradients, Callable[[], Tensor]]]]:
    """Return whether any norm is not finite (a tensor where reading it would wait), and the counts for each gradient.

    The norms tell, so the usual finite step costs no further pass where values can be read.
    """
    if mode == "propagate" or not active:
        return False, []
    parts = [part for _, part in active]
    waits = not all(part.readable_now() for part in parts)
    raises = mode == "raise" and not dry_run
    bad: bool | Tensor = _any_nonfinite(active) if not waits or mode != "zero" or dry_run else True
    if raises and isinstance(bad, Tensor) and has_no_values(bad):
        raise UnsupportedGradientError(
            "the gradients are on the meta device or fake: they have shapes and no values, so that none can be "
            'found to be finite. Pass nonfinite="propagate", which does not look.'
        )
    if (not waits or raises) and not bool(bad):
        return False, []
    counts = [(part, part.count_nonfinite(later=waits and not raises)) for part in parts]
    if dry_run:
        return (bad if waits else True), counts
    if raises:
        raise _nonfinite(active, ClipReport([], False, counts).offenders)
    if mode == "zero":
        require_same_places(parts)
        offending = [part.values if waits else _with_any(part.values, n()) for part, n in counts]
        _zero_nonfinite(active, offending, waits)
    return (bad if waits else True), counts


def _any_nonfinite(active: list[tuple[Policy, Gradients]]) -> Tensor:
    finite = [part.total_norm(rule.p) < math.inf for rule, part in active]  # not one that is NaN
    if len(finite) == 1:
        return finite[0].logical_not()
    return torch.stack([each.to(finite[0].device) for each in finite]).all().logical_not()


def _with_any(values: list[Tensor], counts: Tensor) -> list[Tensor]:
    return [v for v, n in zip(values, counts.tolist(), strict=True) if n]


def _zero_nonfinite(active: list[tuple[Policy, Gradients]], offending: list[list[Tensor]], waits: bool) -> None:
    """Zero what is not finite and measure again; restore and raise where even that norm exceeds float64."""
    copies = [[] if waits else _apply.stored_copies(values) for values in offending]
    for (_, part), values in zip(active, offending, strict=True):
        _apply.zero_nonfinite_(values)
        part.invalidate()
    try:
        measure_together([(part, rule.p) for rule, part in active])
        if not waits and bool(_any_nonfinite(active)):
            raise _nonfinite(active, {})
    except GradreinError:
        for values, kept in zip(offending, copies, strict=True):
            _apply.restore_(values, kept)
        raise
    for _, part in active:
        part.write_back()


def _nonfinite(active: list[tuple[Policy, Gradients]], offenders: dict[str, int]) -> NonFiniteGradientError:
    if not offenders:
        why = active[0][1].why_not_finite()
        return NonFiniteGradientError(f'{why}. No gradient was changed. Pass nonfinite="skip" to zero the whole step.')
    many = f"{len(offenders)} gradient{'s are' if len(offenders) > 1 else ' is'} not finite: "
    return NonFiniteGradientError(
        f"{many}{_measure.list_offenders(offenders)}. No gradient was changed. "
        'Pass nonfinite="skip" to zero the whole step or "zero" to zero only those values.',
        offenders,
    )


def _predict_norms(decision: Scale | Clamp, part: Gradients, p: float) -> Tensor | None:
    """Return the norms after a decision that is not applied, where they do not follow from it."""
    if isinstance(decision, Clamp) and not isinstance(decision.limit, float | Tensor):
        return part.combined(_measure.norms(_apply.clamped(part.values, decision.limit), p), p)
    if isinstance(decision, Scale) and not isinstance(decision.by, Tensor):
        pairs = zip(part.values, decision.by, strict=True)
        return part.combined(_measure.norms([g.detach() * factor for g, factor in pairs], p), p)
    return None


def _apply_decision(decision: Scale | Clamp, part: Gradients, p: float) -> Tensor | None:
    """Change the gradients. Return their norms where they have to be measured. Below the limit nothing is written."""
    now = part.readable_now()
    if isinstance(decision, Clamp):
        if not isinstance(decision.limit, float | Tensor):
            if not part.is_split and all(limit is None for limit in decision.limit):
                return part.norms(p)
            _apply.clamp_each_(part.values, decision.limit)
            return _measured_after(part, p)
        limit = read_threshold(decision.limit, "limit") if now else decision.limit
        if not now or not bool((part.norms(p) <= limit).all()):  # also where a norm is NaN, which hides the others
            _apply.clamp_(part.values, limit)
            part.write_back()
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
    _apply.scale_slices_(part.values, by)
    return _measured_after(part, p)


def _measured_after(part: Gradients, p: float) -> Tensor | None:
    part.write_back()
    return _measure.norms(part.values, p) if not part.is_split else None
