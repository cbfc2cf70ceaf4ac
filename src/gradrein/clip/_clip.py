"""`clip_`: measure, decide, apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .. import _measure
from .._devices import has_no_values
from .._events import notify_clip
from .._validate import read_threshold
from ..distributed import PlacementSpec
from ..errors import ArgumentError, ArgumentTypeError, NonFiniteGradientError, UnsupportedGradientError
from ..policies import Clamp, Policy, Scale, Skip
from ..policies.base import check
from . import _apply
from ._gate import enter
from ._gradients import Gradients
from ._report import ClipReport, Outcome, describe_report
from .target.parameters import Target, group_labels, parameters_of
from .target.patterns import check_policies, describe_policy, match_names

NonFinite: TypeAlias = Literal["raise", "skip", "zero", "propagate"]
_UNCHANGED = Scale(torch.ones((), dtype=torch.float64, device="cpu"))
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
            matches a name wins, each group has its own norm, and None leaves a group unchanged. `"group:0"` stands for
            the first parameter group of an optimizer. Build a policy that learns once, before the loop.
        nonfinite: What to do if a gradient has NaN or infinite values. `"raise"` raises an error that names them and
            changes nothing (it has to read one value from the device). `"skip"` sets every gradient of the target to
            zero. `"zero"` sets those values to zero and clips the rest. `"propagate"` does not check: gradients that
            share a norm with a non-finite one stay unchanged, because there is no factor to scale them by; a limit on
            each value, as in `by_value`, applies to infinite values too and leaves NaN, as `clip_grad_value_` does.
        dry_run: Change nothing and raise nothing about values: the report says what would have been done. Adaptive
            policies update their state as usual.
        placement: Which plain tensors differ between ranks: `Disjoint` of `gradrein.distributed`, several of them, or a
            mapping from name patterns to those. Not needed for DTensors.

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
        [`gradrein.distributed.Disjoint`][]
    """
    if nonfinite not in _NONFINITE:
        raise ArgumentError(f"`nonfinite` is one of {', '.join(_NONFINITE)}; found {nonfinite!r}.")

    def call() -> str:
        check_policies(policy)
        return f"clip_({describe_policy(policy, placement is None)}, {nonfinite=}, {dry_run=})"

    grads = enter(target, placement, call)
    if any(map(has_no_values, grads.local[:1])):
        raise UnsupportedGradientError(
            "the gradients are on the meta device or fake: they have shapes and no values, so that a policy has "
            "nothing to decide by. Call clip_grad_norm_, which needs no values."
        )
    return _clip(grads, _assign(policy, grads, group_labels(target)), nonfinite, dry_run)


def _assign(policy: Any, grads: Gradients, labels: list[str] | None) -> list[tuple[Any, Gradients]]:
    """Return each policy with the gradients it is for. In a mapping the first pattern that matches a name wins."""
    check_policies(policy)
    if not isinstance(policy, Mapping):
        return [(policy, grads)]
    where = [*range(len(grads.tensors))] if grads.where is None else grads.where
    listed = grads.target_names if labels is None else labels
    has_gradient = [False] * (len(grads.tensors) if listed is None else len(listed))
    for i in where:
        has_gradient[i] = True
    pattern_of = match_names(policy, grads.target_names, labels, has_gradient, all_here=not grads.has_others)
    indices: dict[str, list[int]] = {pattern: [] for pattern in policy}
    for k, i in enumerate(where):
        indices[str(pattern_of[i])].append(k)
    return [(each, grads.subset(indices[pattern], pattern)) for pattern, each in policy.items()]


def _clip(
    grads: Gradients, groups: list[tuple[Policy | None, Gradients]], nonfinite: NonFinite, dry_run: bool
) -> ClipReport:
    """Refuse, measure, decide, and only then write."""
    active = [(policy, group) for policy, group in groups if policy is not None and (group.tensors or grads.has_others)]
    for policy, group in active:
        check(policy, group)
        if nonfinite == "zero":
            group.refuse_partial('nonfinite="zero"')
    if len(groups) > 1 or nonfinite == "zero":  # a single policy refuses by itself what it cannot write
        _apply.check_writable(grads.local if nonfinite == "skip" else [g for _, group in active for g in group.local])
    if active or grads.is_split:
        grads.measure([(group, policy.p) for policy, group in active] or [(grads, 2.0)])
    bad, counts = _find_nonfinite(active, nonfinite, dry_run)
    skipped = bad if nonfinite == "skip" else False
    writes = not dry_run and skipped is not True
    decided = [_decide(policy, group) for policy, group in active]
    # Norms are exchanged before anything is written.
    expected = [
        _predict_norms(decision, group, policy.p) if group.is_split or not writes else None
        for (policy, group), (decision, _) in zip(active, decided, strict=True)
    ]
    outcomes = []
    for (policy, group), (decision, skip), after in zip(active, decided, expected, strict=True):
        before, terms = group.norms(policy.p), group.norm_terms(policy.p)
        measured = _apply_decision(decision, group, policy.p) if writes else None
        if writes and skip is not False:
            _apply.zero_(group.local, skip if isinstance(skip, Tensor) else None)
        outcomes.append(Outcome(policy.p, group, before, terms, decision, measured if after is None else after, skip))
    if skipped is not False and not dry_run:
        _apply.zero_(grads.local, skipped if isinstance(skipped, Tensor) else None)
    return ClipReport(outcomes, skipped, counts, dry_run)


def _decide(policy: Policy, group: Gradients) -> tuple[Scale | Clamp, bool | Tensor]:
    """Return what to do with the gradients of a policy, and whether to set them to zero instead."""
    decision = policy.decide(group)
    if not isinstance(decision, (Scale, Clamp, Skip)):
        raise ArgumentTypeError(
            f"a policy must return Scale, Clamp or Skip of gradrein.policies; {type(policy).__name__} returned "
            f"{type(decision).__name__}: {decision!r:.80}. No gradient was changed."
        )
    skip: bool | Tensor = False
    if isinstance(decision, Skip):
        skip = bool(decision.when) if group.readable_now() else decision.when
        decision = decision.otherwise or _UNCHANGED
    if isinstance(decision, Clamp) and policy.p != math.inf:
        raise ArgumentError(
            f"{type(policy).__name__} limits values and has p = {policy.p}: what such a norm comes to is not known. "
            "Write `p = math.inf` in the class, the largest magnitude. No gradient was changed."
        )
    return decision, skip


def _find_nonfinite(
    active: list[tuple[Policy, Gradients]], mode: NonFinite, dry_run: bool
) -> tuple[bool | Tensor, list[tuple[Gradients, Callable[[], Tensor]]]]:
    """Return whether any norm is not finite (a tensor where reading it would wait), and the counts for each gradient.

    The norms tell, so the usual finite step costs no further pass where values can be read.
    """
    if mode == "propagate" or not active:
        return False, []
    groups = [group for _, group in active]
    waits = not all(group.readable_now() for group in groups)
    raises = mode == "raise" and not dry_run
    bad: bool | Tensor = _any_nonfinite(active) if not waits or mode != "zero" or dry_run else True
    if (not waits or raises) and not bool(bad):
        return False, []
    counts = [(group, group.count_nonfinite(later=waits and not raises)) for group in groups]
    if dry_run:
        return (bad if waits else True), counts
    if raises:
        raise _nonfinite(active, ClipReport([], False, counts).offenders)
    if mode == "zero":
        if not waits and not groups[0].has_others and not any(bool(n().any()) for _, n in counts):
            raise _nonfinite(active, {})  # finite values, of a norm that float64 does not hold
        for group, n in counts:
            _apply.zero_nonfinite_(group.local if waits else _with_any(group.local, n()))
            group.invalidate()
        groups[0].measure([(group, policy.p) for policy, group in active])
    return (bad if waits else True), counts


def _any_nonfinite(active: list[tuple[Policy, Gradients]]) -> Tensor:
    finite = [group.total_norm(policy.p) < math.inf for policy, group in active]  # not one that is NaN
    if len(finite) == 1:
        return finite[0].logical_not()
    return torch.stack([each.to(finite[0].device) for each in finite]).all().logical_not()


def _with_any(values: list[Tensor], counts: Tensor) -> list[Tensor]:
    return [v for v, n in zip(values, counts.tolist(), strict=True) if n]


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


def _predict_norms(decision: Scale | Clamp, group: Gradients, p: float) -> Tensor | None:
    """Return the norms after a decision that is not applied, where they do not follow from it."""
    if isinstance(decision, Scale) and not isinstance(decision.by, Tensor):
        pairs = zip(group.values, decision.by, strict=True)
        return group.combined(_measure.norms([g.detach() * factor for g, factor in pairs], p), p)
    return None


def _apply_decision(decision: Scale | Clamp, group: Gradients, p: float) -> Tensor | None:
    """Change the gradients. Return their norms where they have to be measured. Below the limit nothing is written."""
    now = group.readable_now()
    if isinstance(decision, Clamp):
        limit = read_threshold(decision.limit, "limit") if now else decision.limit
        if not now or not bool((group.norms(p) <= limit).all()):  # also where a norm is NaN, which hides the others
            _apply.clamp_(group.local, limit)
        return None
    return _scale(decision, group, p, now)


def _scale(decision: Scale, group: Gradients, p: float, now: bool) -> Tensor | None:
    by = decision.by
    if decision is _UNCHANGED:
        return None
    if isinstance(by, Tensor):
        if not now:
            _apply.scale_(group.local, by)
        elif by.dim() == 0:
            if (factor := by.item()) != 1:
                _apply.scale_(group.local, factor)
        elif bool((by != 1).any()):
            _apply.scale_(group.local, by)
        return None
    _apply.scale_slices_(group.local, by)
    return None if group.is_split else _measure.norms(group.local, p)
