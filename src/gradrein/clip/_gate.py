"""The one way in: each call reads its target here, and ranks compare their calls before anything is measured.

What comes out is a `Gradients`: tensors of this process and, where other ranks hold parts or copies of them, a
`RankShare`, which says what numbers of this process come to over all ranks. Code behind it asks only whether it is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _devices, _measure
from .._torch.dtensor import dtensor_class, grads_of, is_dtensor, specs_of, stored_parts, stored_shards
from ..distributed import (
    Group,
    Layout,
    PlacementSpec,
    Reduction,
    fingerprint,
    parameters_fingerprint,
)
from ..errors import UnsupportedGradientError
from ._gradients import Gradients
from .target.layouts import layouts_of, partial_ones, placements_of, reduced, refuse_shared_memory
from .target.parameters import Target, named, once, warn_raw_gradients

_WHAT = "gradient norms"
_PLAIN = {Tensor, torch.nn.Parameter}  # no DTensors
_PARAMETERS = "the parameters, or on their order (their names, shapes, types and placements, and those of gradients)"
_PLACEMENTS = "`placement`, or on the order of its patterns"


def enter(
    target: Target, placement: PlacementSpec | None, call: Callable[[], str], *, measured: bool = True
) -> Gradients:
    """Return the gradients of a target. Where they lie on several ranks, those compare their calls.

    Args:
        target: What was passed as parameters.
        placement: How plain tensors are distributed over ranks.
        call: Describes the call, in words that are the same on every rank that makes the same call.
        measured: Whether norms are exchanged next, which compares the calls; otherwise they are compared here.

    Raises:
        RankError: (a RuntimeError) The ranks were called with different things; on all of them.
    """
    # The usual case, and the one that has to be fast, is a list of parameters.
    if type(target) is list and {*map(type, target)} <= _PLAIN:
        return _read(None, target, [p.grad for p in target], placement, call, measured)
    names, parameters = named(target)
    return _read(names, parameters, grads_of(parameters), placement, call, measured)


def enter_tensors(target: Target, call: Callable[[], str]) -> Gradients:
    """Return tensors that are gradients themselves, as `enter` does."""
    names, tensors = named(target)
    return _read(names, tensors, [*tensors], None, call, True)


def whole_number(norm: Any) -> Any:
    """Return a norm that torch's own `get_total_norm` may leave as a partial DTensor, after reducing it."""
    return reduced(norm, _WHAT) if partial_ones(specs_of([norm])) else norm


def _read(
    names: list[str] | None,
    parameters: list[Tensor],
    grads: list[Tensor | None],
    placement: PlacementSpec | None,
    call: Callable[[], str],
    measured: bool,
) -> Gradients:
    kinds = {*map(type, grads)}
    if kinds <= {type(None)}:
        warn_raw_gradients(parameters)
    kinds.update(map(type, parameters))
    alone = placement is None and (kinds <= {*_PLAIN, type(None)} or not _on_several_ranks(kinds))
    if alone and type(None) not in kinds and len({*map(id, grads)}) == len(grads):  # as mostly
        return Gradients(parameters, grads, names)  # type: ignore[arg-type]  # no None among them
    where, kept = once(grads)
    share = None if alone else _read_share(names, parameters, grads, where, placement, call(), measured)
    return Gradients([parameters[i] for i in where], kept, names, where, share)


def _on_several_ranks(kinds: set[type]) -> bool:
    """Return whether DTensors are among tensors of these types. Where none can exist, they are not looked at."""
    kind = dtensor_class()
    if kind is None or not dist.is_available():
        return False
    if torch.compiler.is_compiling() and not dist.is_initialized():  # nothing to trace
        return False
    return any(issubclass(each, kind) for each in kinds)


def _read_share(
    names: list[str] | None,
    parameters: list[Tensor],
    grads: list[Tensor | None],
    at: list[int],
    placement: PlacementSpec | None,
    call: str,
    measured: bool,
) -> RankShare:
    """Return what this rank holds of gradients on several ranks, after these have compared what they can."""
    patterns, pattern_of = placements_of(placement, names, len(parameters))
    layouts, groups = layouts_of(parameters, grads, patterns, pattern_of)
    double = _measure.any_double([*parameters, *(g for g in grads if g is not None)])
    asked: dict[str, Any] = {"the call": call, "whether a gradient is of float64": double}
    on_group, same = None, None
    if any(patterns):
        own = [set() if disjoint else {*groups} for disjoint in patterns]  # the same on every rank, if plain
        over = [layout.groups or own[n] for layout, n in zip(layouts, pattern_of, strict=True)]
        on_group = _on_groups(names, parameters, grads, over, groups, patterns)
    else:
        asked["the number of parameters"] = len(parameters)
        asked["the sizes of mesh dimensions"] = [group.size for group in groups]
        missing = [f"gradient {i}" if names is None else names[i] for i, g in enumerate(grads) if g is None]
        asked["which gradients are missing (give these zeros)"] = ", ".join(missing) or "none"
        same = {_PARAMETERS: parameters_fingerprint(names, parameters, grads)}
    reduction = Reduction(groups, _WHAT, asked, same, on_group, rescaled=double)
    with torch.no_grad():
        given = [i for i, g in enumerate(grads) if g is not None]
        held = stored_parts([grads[i] for i in given], specs_of([grads[i] for i in given]))
        refuse_shared_memory([grads[i] for i in given], held, [patterns[pattern_of[i]] for i in given])
        of = dict(zip(given, held, strict=True))
        local = [of[i] for i in at]
        partial = partial_ones(specs_of([grads[i] for i in at]))
        # Messages that reduce partial gradients have their sizes; with placement, a rank may have nothing to measure.
        if not measured or partial or any(patterns):
            reduction.agree()
        values = [*local]
        for k in partial:
            values[k] = reduced(grads[at[k]], _WHAT)
    share = RankShare(local, values, [layouts[i] for i in at], reduction, partial, double)
    share.stages = [
        ({k for k, i in enumerate(at) if pattern_of[i] == number}, Layout(disjoint, (0,) * len(disjoint)))
        for number, disjoint in enumerate(patterns)
        if disjoint
    ]
    return share


def _on_groups(
    names: Sequence[str] | None,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    over: Sequence[Any],
    groups: Sequence[Group],
    patterns: Sequence[tuple[Group, ...]],
) -> dict[Group, dict[str, int]]:
    """Return numbers for what lies on each group, where ranks may hold different parameters."""
    numbers = {}
    for group in groups:
        at = [i for i, own in enumerate(over) if group in own]
        some = None if names is None else [names[i] for i in at]
        number = parameters_fingerprint(some, [parameters[i] for i in at], [grads[i] for i in at])
        numbers[group] = {_PARAMETERS: number, _PLACEMENTS: fingerprint([group in each for each in patterns])}
    return numbers


class RankShare:
    """What this process holds of gradients of which others hold parts or copies, and what they come to together.

    Every process calls the same methods in the same order.

    Attributes:
        local: What is held of each gradient, to be written to.
        values: The same, to be measured: summands are added up.
        partial: Those of which this process holds a summand.
        double: Whether any gradient of any process is of double precision.
        stages: For each pattern of `placement` the gradients under it here, and over which groups ranks hold others.
    """

    def __init__(
        self,
        local: list[Tensor],
        values: list[Tensor],
        layouts: list[Layout],
        reduction: Reduction,
        partial: Sequence[int],
        double: bool,
    ) -> None:
        self.local, self.values, self.partial, self.double = local, values, partial, double
        self.stages: list[tuple[set[int], Layout]] = []
        self._layouts, self._reduction = layouts, reduction

    def subset(self, where: Sequence[int]) -> RankShare:
        """Return some of them."""
        local, values = [self.local[i] for i in where], [self.values[i] for i in where]
        partial = [k for k, i in enumerate(where) if i in self.partial]
        some = RankShare(local, values, [self._layouts[i] for i in where], self._reduction, partial, self.double)
        some.stages = [({k for k, i in enumerate(where) if i in here}, others) for here, others in self.stages]
        return some

    def total(self, p: float, foreach: bool | None) -> Tensor:
        """Return the norm of all gradients of all processes. Those that lie alike are measured as one."""
        sets: dict[Any, list[int]] = {}
        for i, layout in enumerate(self._layouts):
            sets.setdefault((id(layout), *(i in here for here, _ in self.stages)), []).append(i)
        alike = list(sets.values())
        totals = [_measure.total_norm([self.values[i] for i in at], p, foreach) for at in alike]
        each = [torch.as_tensor(value, dtype=_devices.accumulation_dtype(norm.device)) for norm, value in totals]
        norms = torch.stack(each) if each else torch.zeros(0, dtype=torch.float64)
        ((_, terms),) = combined([(self.subset([at[0] for at in alike]), norms, p)])
        with torch.no_grad():
            return _measure.total(terms, p)

    def terms(self, norms: list[Tensor], shares: Sequence[tuple[RankShare, float]]) -> list[Tensor]:
        """Return for each share its norms and those of gradients of other processes, each counted once."""
        if not self.stages:
            return norms
        slots = [(k, share.stages[s], p) for k, (share, p) in enumerate(shares) for s in range(len(self.stages))]
        totals = [_measure.total(norms[k][sorted(here)], p) for k, (here, _), p in slots]
        held = torch.stack([total.to(totals[0].device) for total in totals])
        held = self._reduction.norms(held, [p for *_, p in slots], [others for _, (_, others), _ in slots])
        staged = [{i for here, _ in share.stages for i in here} for share, _ in shares]
        rest = [[i for i in range(len(n)) if i not in own] for n, own in zip(norms, staged, strict=True)]
        split = torch.split(held, len(self.stages))
        return [torch.cat([n[r], t.to(n.device)]) for n, r, t in zip(norms, rest, split, strict=True)]

    def combine(self, each: Tensor, p: float) -> Tensor:
        """Return what values of gradients come to: a p-norm; of order 1, a sum.

        Args:
            each: A value for each gradient, or a row of them for each kind of value.
            p: The order.
        """
        flat = each.flatten().to(torch.float64)
        layouts = self._layouts * (len(flat) // max(1, len(self._layouts)))
        norms = self._reduction.sum(flat, layouts) if p == 1 else self._reduction.norms(flat, [p] * len(flat), layouts)
        return norms.view(each.shape).to(each.device)

    def combine_slices(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of the part here."""
        along = [layout.along(each) for layout, each in zip(self._layouts, dims, strict=True)]
        split = [k for k, layout in enumerate(along) if layout.shards]
        whole = list(slices)
        if split:
            flat = torch.cat([slices[k].flatten().to(torch.float64) for k in split])
            layouts = [along[k] for k in split for _ in range(slices[k].numel())]
            joined = self._reduction.norms(flat, [2.0] * len(flat), layouts)
            for k, each in zip(split, torch.split(joined, [slices[k].numel() for k in split]), strict=True):
                whole[k] = each.view(slices[k].shape).to(slices[k].device)
        return whole

    def weights(self, parameters: Sequence[Any]) -> list[Tensor]:
        """Return what is held of parameters, which must lie as their gradients do."""
        for layout, p in zip(self._layouts, parameters, strict=True):
            kinds = p.placements if is_dtensor(p) else ()
            dims = tuple(kind.dim for kind in kinds if not (kind.is_replicate() or kind.is_partial()))
            if kinds and dims != layout.dims:
                raise UnsupportedGradientError(
                    f"a parameter of shape {tuple(p.shape)} has placements {p.placements}, its gradient has others, "
                    "and this policy compares the two. Redistribute the gradient before clipping."
                )
        return [(stored_shards([p])[0] if is_dtensor(p) else p).detach() for p in parameters]

    def measure(self, shares: Sequence[tuple[RankShare, float]]) -> list[tuple[Tensor, Tensor]]:
        """Return for each of several shares the norm of each whole gradient, and terms whose norm is that of all.

        Args:
            shares: Gradients that share a policy, and the order of its norm.
        """
        return combined([(share, _measure.norms(share.values, p), p) for share, p in shares])


def combined(shares: Sequence[tuple[RankShare, Tensor, float]]) -> list[tuple[Tensor, Tensor]]:
    """Return for several shares the norms of whole gradients, given those of what is here, and terms, as `measure`."""
    home = shares[0][1].device
    layouts = [layout for share, _, _ in shares for layout in share._layouts]
    orders = [p for share, _, p in shares for _ in share._layouts]
    first = shares[0][0]
    with torch.no_grad():
        whole = first._reduction.norms(torch.cat([norms.to(home) for _, norms, _ in shares]), orders, layouts)
        split = torch.split(whole, [len(norms) for _, norms, _ in shares])
        each = [n.to(norms.device) for n, (_, norms, _) in zip(split, shares, strict=True)]
        return list(zip(each, first.terms(each, [(share, p) for share, _, p in shares]), strict=True))
