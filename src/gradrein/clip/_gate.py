"""The one way in: each call reads its target here, and ranks compare their calls here or with the first norms.

What comes out is a `Gradients`; where other ranks hold parts or copies of them a `SplitGradients`, which has the same
methods and says what numbers of this process come to over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _devices, _measure
from .._torch.dtensor import dtensor_class, grads_of, specs_of, stored_parts, stored_shard
from ..distributed import Group, Layout, PlacementSpec, Reduction, fingerprint, parameters_fingerprint
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
    entered = Gradients([parameters[i] for i in where], kept, names, where)
    return entered if alone else _agree(entered, parameters, grads, placement, call(), measured)


def _on_several_ranks(kinds: set[type]) -> bool:
    """Return whether DTensors are among tensors of these types. Where none can exist, they are not looked at."""
    kind = dtensor_class()
    if kind is None or not dist.is_available():
        return False
    if torch.compiler.is_compiling() and not dist.is_initialized():  # nothing to trace
        return False
    return any(issubclass(each, kind) for each in kinds)


def _agree(
    entered: Gradients,
    parameters: list[Tensor],
    grads: list[Tensor | None],
    placement: PlacementSpec | None,
    call: str,
    measured: bool,
) -> SplitGradients:
    """Return what this rank holds of gradients on several ranks, after these have compared what they can."""
    names, at = entered.target_names, entered.where or []
    patterns, pattern_of = placements_of(placement, names, len(parameters))
    layouts, groups = layouts_of(parameters, grads, patterns, pattern_of)
    double = _measure.any_double([*parameters, *(g for g in grads if g is not None)])
    asked: dict[str, Any] = {"the call": call, "whether a gradient is of float64": double}
    if any(patterns):
        own = [set() if disjoint else {*groups} for disjoint in patterns]  # the same on every rank, if plain
        over = [layout.groups or own[n] for layout, n in zip(layouts, pattern_of, strict=True)]
        on_group = _on_groups(names, parameters, grads, over, groups, patterns)
    else:
        asked["the number of parameters"] = len(parameters)
        asked["the sizes of mesh dimensions"] = [group.size for group in groups]
        missing = [f"gradient {i}" if names is None else names[i] for i, g in enumerate(grads) if g is None]
        asked["which gradients are missing (give these zeros)"] = ", ".join(missing) or "none"
        number = parameters_fingerprint(names, parameters, grads)
        on_group = {group: {_PARAMETERS: number} for group in groups}
    reduction = Reduction(groups, _WHAT, asked, on_group, rescaled=double)
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
    stages = [
        ({k for k, i in enumerate(at) if pattern_of[i] == number}, Layout(disjoint, (0,) * len(disjoint)))
        for number, disjoint in enumerate(patterns)
        if disjoint
    ]
    return SplitGradients(entered, local, values, [layouts[i] for i in at], stages, reduction)


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


class SplitGradients(Gradients):
    """Gradients of which other processes hold parts or copies: what they come to together.

    Every process calls the same methods in the same order.

    Args:
        entered: The gradients that this process has.
        local: What is held here of each gradient.
        values: The same, where summands are added up.
        layouts: How each lies over ranks.
        stages: For each pattern of `placement` the gradients under it here, and over which groups ranks hold others.
        reduction: What numbers of this process come to over all.
    """

    is_split = True
    _lists = (*Gradients._lists, "_layouts")

    def __init__(
        self,
        entered: Gradients,
        local: list[Tensor],
        values: list[Tensor],
        layouts: list[Layout],
        stages: list[tuple[set[int], Layout]],
        reduction: Reduction,
    ) -> None:
        super().__init__(entered.parameters, entered.tensors, entered.target_names, entered.where)
        self.local, self.values, self.has_others = local, values, bool(stages)
        self._layouts, self._stages, self._reduction = layouts, stages, reduction

    def subset(self, where: Sequence[int], pattern: str) -> Gradients:
        """Return some of them, that a name pattern selects."""
        subset = super().subset(where, pattern)
        assert isinstance(subset, SplitGradients)
        subset._stages = [({k for k, i in enumerate(where) if i in here}, others) for here, others in self._stages]
        return subset

    def _total(self, p: float, foreach: bool | None) -> tuple[Tensor, float | Tensor]:
        """Return the norm of all gradients of all processes. Those that lie alike are measured as one."""
        sets: dict[Any, list[int]] = {}
        for i, layout in enumerate(self._layouts):
            sets.setdefault((id(layout), *(i in here for here, _ in self._stages)), []).append(i)
        totals = [_measure.total_norm([self.values[i] for i in at], p, foreach) for at in sets.values()]
        each = [torch.as_tensor(value, dtype=_devices.accumulation_dtype(norm.device)) for norm, value in totals]
        norms = torch.stack(each) if each else torch.zeros(0, dtype=torch.float64)
        firsts = self.subset([at[0] for at in sets.values()], self.pattern)
        ((_, terms),) = self._whole([(firsts, p)], [norms])
        with torch.no_grad():
            total = _measure.total(terms, p)
        number = total.item() if self.readable_now() else None
        norm = total.to(_measure.dtype_of_norm(self._reduction.rescaled, number))
        return norm, total if number is None else number

    def _whole(self, several: Sequence[tuple[Any, float]], each: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        home = each[0].device
        layouts = [layout for grads, _ in several for layout in grads._layouts]
        orders = [p for grads, p in several for _ in grads._layouts]
        with torch.no_grad():
            joined = self._reduction.norms(torch.cat([norms.to(home) for norms in each]), orders, layouts)
            split = torch.split(joined, [len(norms) for norms in each])
            whole = [n.to(norms.device) for n, norms in zip(split, each, strict=True)]
            return list(zip(whole, self._terms(several, whole), strict=True))

    def _terms(self, several: Sequence[tuple[Any, float]], norms: list[Tensor]) -> list[Tensor]:
        """Return for each of several its norms and those of gradients of other processes, each counted once."""
        if not self._stages:
            return norms
        slots = [(n, stage, p) for n, (grads, p) in zip(norms, several, strict=True) for stage in grads._stages]
        totals = [_measure.total(n[sorted(here)], p) for n, (here, _), p in slots]
        held = torch.stack([total.to(totals[0].device) for total in totals])
        held = self._reduction.norms(held, [p for *_, p in slots], [others for _, (_, others), _ in slots])
        staged = [{i for here, _ in grads._stages for i in here} for grads, _ in several]
        rest = [[i for i in range(len(n)) if i not in own] for n, own in zip(norms, staged, strict=True)]
        split = torch.split(held, len(self._stages))
        return [torch.cat([n[r], t.to(n.device)]) for n, r, t in zip(norms, rest, split, strict=True)]

    def refuse_disjoint(self, policy: str) -> None:
        """Raise if other ranks hold other parameters."""
        if self._stages:
            raise UnsupportedGradientError(
                f"{policy} compares gradients with parameters, and `placement` says that ranks hold different "
                "parameters: each rank would decide for itself. Use a policy that uses norms only, such as ByMedian."
            )

    def refuse_partial(self, policy: str) -> None:
        """Raise if other ranks hold summands of a gradient."""
        for i, (stored, value) in enumerate(zip(self.local, self.values, strict=True)):
            if stored is not value:
                raise UnsupportedGradientError(
                    f"{self.names()[i]} is partial: other ranks hold summands of its elements, which {policy} looks at "
                    "one by one. Redistribute it before clipping: `grad.redistribute(placements=parameter.placements)`."
                )

    def weights(self) -> list[Tensor]:
        """Return what is held of parameters, which must lie as their gradients do."""
        for layout, p, spec in zip(self._layouts, self.parameters, specs_of(self.parameters), strict=True):
            kinds = () if spec is None else spec.placements
            dims = tuple(kind.dim for kind in kinds if not (kind.is_replicate() or kind.is_partial()))
            if kinds and dims != layout.dims:
                raise UnsupportedGradientError(
                    f"a parameter of shape {tuple(p.shape)} has placements {kinds}, its gradient has others, "
                    "and this policy compares the two. Redistribute the gradient before clipping."
                )
        return [stored_shard(p).detach() for p in self.parameters]

    def combined(self, each: Tensor, p: float = 1.0) -> Tensor:
        """Return what values of the part of each gradient here come to.

        Args:
            each: A value for each gradient, or a row of them for each kind of value.
            p: The order.
        """
        flat = each.flatten().to(torch.float64)
        layouts = self._layouts * (len(flat) // max(1, len(self._layouts)))
        norms = self._reduction.sum(flat, layouts) if p == 1 else self._reduction.norms(flat, [p] * len(flat), layouts)
        return norms.view(each.shape).to(each.device)

    def combined_slices(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
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

    def count_nonfinite(self, *, later: bool = False) -> Callable[[], Tensor]:  # noqa: ARG002
        """Return how many values of each whole gradient are NaN or infinite: counted now, by all ranks together."""
        counts = self.combined(_measure.count_nonfinite(self.values).to(torch.float64))
        # Of copies it is the mean: one that is not finite in some of them counts too.
        counts = (counts - 1e-6).ceil()
        return lambda: counts

    def why_not_finite(self) -> str:
        """Explain a norm that is not finite where no gradient is known to hold such a value."""
        return f"a gradient on another rank is not finite, or {super().why_not_finite()}"
