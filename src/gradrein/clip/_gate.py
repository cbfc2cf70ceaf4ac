"""The one way in: each call reads its target here, and ranks compare their calls before anything is measured.

What comes out is a `Gradients`: tensors of this process and, where other ranks hold parts or copies of them, `Parts`,
which says what numbers of this process come to over all ranks. Nothing behind it knows of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _devices, _measure
from .._measure import shares_memory
from .._torch.dtensor import dtensor_class, grads_of, is_dtensor, specs_of, stored_parts, stored_shards
from ..distributed import (
    Agreement,
    Disjoint,
    Group,
    Layout,
    PlacementSpec,
    Reduction,
    Replicated,
    checksum,
    fingerprint,
    groups_of,
    parameters_fingerprint,
)
from ..errors import RankError, UnsupportedGradientError
from ._gradients import Gradients
from .target.layouts import (
    Layouts,
    partial_ones,
    reduced,
    refuse_shared_memory,
    shared_memory,
    writes_partial,
)
from .target.parameters import Target, named, once, warn_raw_gradients
from .target.placement import placements_of

_WHAT = "gradient norms"
_EXACT = 2**52  # float64 holds integers of this size
_PARAMETERS = "the parameters, or on their order (their names, shapes, types and placements, and those of gradients)"
_PLACEMENTS = "`placement`, or on the order of its patterns"
_OTHER_COPIES = (
    "ranks hold different parameters under one Replicated pattern: their number, shapes or dtypes differ, or some have "
    "no gradient. Those that hold any have to hold the same ones: use one pattern for each set of copies, and give "
    "missing gradients zeros."
)
_DIFFERENT_PLACES = (
    "ranks hold copies of one gradient that are not finite in different places, such as on some of them only: to "
    'zero these values would leave copies that differ. Pass nonfinite="raise", which names them, or "skip".'
)


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
    names, parameters = (None, target) if type(target) is list else named(target)
    try:
        grads = grads_of(parameters)
    except AttributeError:  # a list of pairs, of param groups, or of something else
        names, parameters = named(target)
        grads = grads_of(parameters)
    return _read(names, parameters, grads, placement, call, measured)


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
    if placement is None and not _on_several_ranks({*kinds, *map(type, parameters)}):
        if type(None) not in kinds and len({*map(id, grads)}) == len(grads):  # as mostly
            return Gradients(parameters, grads, names)  # type: ignore[arg-type]  # no None among them
        where, kept = once(grads)
        return Gradients([parameters[i] for i in where], kept, names, where)
    where, kept = once(grads)
    parts = _read_parts(names, parameters, grads, where, placement, call(), measured)
    return Gradients([parameters[i] for i in where], kept, names, where, parts)


def _on_several_ranks(kinds: set[type]) -> bool:
    """Return whether DTensors are among tensors of these types. Where none can exist, they are not looked at."""
    kind = dtensor_class()
    if kind is None or not dist.is_available():
        return False
    if torch.compiler.is_compiling() and not dist.is_initialized():  # nothing to trace
        return False
    any_dtensor = any(issubclass(each, kind) for each in kinds)
    if any_dtensor and not dist.is_initialized():
        raise RankError(
            "parameters are DTensors, but the process group of this process was destroyed, so their norm cannot be "
            "computed. Clip before destroy_process_group(). No gradient was changed on this rank."
        )
    return any_dtensor


def _read_parts(
    names: list[str] | None,
    parameters: list[Tensor],
    grads: list[Tensor | None],
    at: list[int],
    placement: PlacementSpec | None,
    call: str,
    measured: bool,
) -> Parts:
    """Return what this rank holds of gradients on several ranks, after these have compared what they can."""
    patterns, pattern_of = placements_of(placement, names, len(parameters))
    layouts = Layouts(parameters, grads, patterns, pattern_of)
    double = _measure.any_double([*parameters, *(g for g in grads if g is not None)])
    asked = {"the call": call, "whether a gradient is of float64": double}
    if not layouts.has_placement:
        asked["the number of parameters"] = len(parameters)
        asked["the sizes of mesh dimensions"] = [group.size for group in layouts.groups]
        asked["which gradients are missing (give these zeros)"] = _missing(names, grads)
    agreement = Agreement(_WHAT, asked, *_fingerprints(names, parameters, grads, layouts, patterns))
    reduction = Reduction(layouts.groups, agreement, rescaled=double)
    stages = [
        Stage(
            frozenset(k for k, i in enumerate(at) if pattern_of[i] == number),
            Layout(layouts.placed(Disjoint, placements), (-1,) * len(layouts.placed(Disjoint, placements))),
            Layout(copies=layouts.placed(Replicated, placements)),
        )
        for number, placements in enumerate(patterns)
        if any(isinstance(each, Disjoint | Replicated) for each in placements)
    ]
    with torch.no_grad():
        present: list[Any] = [grads[i] for i in at]
        specs = specs_of(present)
        local = [*stored_parts(present, specs)]
        placed = [frozenset(each) for each in patterns]
        if layouts.has_placement:
            _refuse_listed_twice(grads, [placed[number] for number in pattern_of])
        refuse_shared_memory(present, local, [placed[pattern_of[i]] for i in at])
        partial = {k: writes_partial(present[k]) for k in partial_ones(specs)}
        # Messages that reduce partial gradients have their sizes; with placement, a rank may have nothing to measure.
        if not measured or partial or layouts.has_placement:
            reduction.agree()
        _compare_copies(reduction, stages, parameters, grads, patterns, pattern_of)
        values = [*local]
        for k in partial:
            values[k] = reduced(present[k], _WHAT)
    return Parts(local, values, [layouts.each[i] for i in at], reduction, stages, partial, double)


def _missing(names: Sequence[str] | None, grads: Sequence[Tensor | None]) -> str:
    missing = [i for i, g in enumerate(grads) if g is None]
    return ", ".join(f"gradient {i}" if names is None else names[i] for i in missing) or "none"


def _fingerprints(
    names: Sequence[str] | None,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    layouts: Layouts,
    patterns: Sequence[Any],
) -> tuple[dict[str, int], dict[Group, dict[str, int]]]:
    """Return numbers for the parameters: those of all, or with `placement` those that lie on each group."""
    if not layouts.has_placement:
        return {_PARAMETERS: parameters_fingerprint(names, parameters, grads)}, {}
    numbers = {}
    for group in layouts.groups:
        at = [i for i, layout in enumerate(layouts.each) if group in layout.groups]
        shards = [bool(layouts.each[i].dims) and not is_dtensor(parameters[i]) for i in at]
        some = None if names is None else [names[i] for i in at]
        number = parameters_fingerprint(some, [parameters[i] for i in at], [grads[i] for i in at], shards)
        kinds = [[type(one).__name__ for one in each if group in groups_of(one.group)] for each in patterns]
        numbers[group] = {_PARAMETERS: number, _PLACEMENTS: fingerprint([each for each in kinds if each])}
    return {}, numbers


def _refuse_listed_twice(grads: Sequence[Tensor | None], placed: Sequence[Any]) -> None:
    """Raise where one gradient is listed under two placements."""
    first: dict[int, int] = {}
    for i, g in enumerate(grads):
        if g is not None and placed[first.setdefault(id(g), i)] != placed[i]:
            raise shared_memory(g, g)


def _compare_copies(
    reduction: Reduction,
    stages: Sequence[Stage],
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    patterns: Sequence[Any],
    pattern_of: Sequence[int],
) -> None:
    """Raise on all ranks where those that hold copies under a pattern of `placement` hold different ones."""
    copied = [n for n, each in enumerate(patterns) if any(isinstance(one, Replicated) for one in each)]
    if not copied:
        return
    marks = []
    for number in copied:
        listed = [i for i, n in enumerate(pattern_of) if n == number]
        held = [i for i in listed if parameters[i].requires_grad or grads[i] is not None]  # a frozen one has none
        each = sorted(fingerprint((parameters[i].shape, parameters[i].dtype, grads[i] is None)) for i in held)
        marks.append(float(fingerprint(each) % _EXACT + 1) if held else 0.0)
    layouts = [stage.copies for stage in stages if stage.copies.groups]
    reduction.require_same(torch.tensor(marks, dtype=torch.float64), layouts, _OTHER_COPIES)


class Stage(NamedTuple):
    """Gradients under one pattern of `placement` that other ranks may hold others of, or copies.

    Attributes:
        members: The gradients here, by index.
        others: Over which groups ranks hold other parameters under the pattern.
        copies: Over which groups some ranks hold copies of these.
    """

    members: frozenset[int]
    others: Layout
    copies: Layout


class Parts:
    """What this process holds of gradients of which others hold parts or copies, and what they come to together.

    Every process calls the same methods in the same order.

    Attributes:
        local: What is held of each gradient, to be written to.
        values: The same, to be measured: summands are added up.
        double: Whether any gradient of any process is of double precision.
        others: Whether other processes may hold other gradients.
    """

    def __init__(
        self,
        local: list[Tensor],
        values: list[Tensor],
        layouts: list[Layout],
        reduction: Reduction,
        stages: list[Stage],
        partial: dict[int, bool],
        double: bool,
    ) -> None:
        self.local, self.values, self.double = local, values, double
        self.others = bool(stages) or any(-1 in layout.dims for layout in layouts)
        self._layouts, self._reduction, self._stages, self._partial = layouts, reduction, stages, partial

    def measure(self, parts: Sequence[tuple[Sequence[int], float]]) -> list[tuple[Tensor, Tensor]]:
        """Return for each part the norm of each whole gradient, and terms whose norm is that of all processes.

        Args:
            parts: Gradients that share a policy, by index, and the order of its norm.
        """
        return self._combine([_measure.norms([self.values[i] for i in at], p) for at, p in parts], parts)

    def total(self, p: float, foreach: bool | None) -> Tensor:
        """Return the norm of all gradients of all processes. Those that lie alike are measured as one."""
        sets: dict[Any, list[int]] = {}
        for i, layout in enumerate(self._layouts):
            stages = [i in stage.members for stage in self._stages] if self._stages else ()
            sets.setdefault((id(layout), *stages), []).append(i)
        alike = list(sets.values())
        totals = [_measure.total_norm([self.values[i] for i in at], p, foreach) for at in alike]
        each = [torch.as_tensor(value, dtype=_devices.accumulation_dtype(norm.device)) for norm, value in totals]
        norms = torch.stack(each) if each else torch.zeros(0, dtype=torch.float64)
        ((_, terms),) = self._combine([norms], [([at[0] for at in alike], p)])
        with torch.no_grad():
            return _measure.total(terms, p)

    def _combine(
        self, norms: list[Tensor], parts: Sequence[tuple[Sequence[int], float]]
    ) -> list[tuple[Tensor, Tensor]]:
        home = norms[0].device if norms else torch.device("cpu")
        sizes, every = [len(at) for at, _ in parts], [i for at, _ in parts for i in at]
        orders = [p for at, p in parts for _ in at]
        with torch.no_grad():
            joined = torch.cat([n.to(home) for n in norms]) if norms else torch.zeros(0, dtype=torch.float64)
            whole = self._reduction.norms(joined, orders, [self._layouts[i] for i in every])
            each = [n.to(own.device) for n, own in zip(torch.split(whole, sizes), norms, strict=True)]
            return list(zip(each, self._with_stages(each, parts), strict=True))

    def _with_stages(self, norms: list[Tensor], parts: Sequence[tuple[Sequence[int], float]]) -> list[Tensor]:
        """Return for each part its norms and those of gradients of other processes, each counted once."""
        if not self._stages:
            return norms
        slots = [(k, stage) for k in range(len(parts)) for stage in self._stages]
        own = [[j for j, i in enumerate(parts[k][0]) if i in stage.members] for k, stage in slots]
        totals = [_measure.total(norms[k][at], parts[k][1]) for (k, _), at in zip(slots, own, strict=True)]
        held = torch.stack([total.to(totals[0].device) for total in totals])
        held = self._reduction.max(held, [stage.copies for _, stage in slots])
        held = self._reduction.norms(held, [parts[k][1] for k, _ in slots], [stage.others for _, stage in slots])
        staged = {i for stage in self._stages for i in stage.members}
        rest = [[j for j, i in enumerate(at) if i not in staged] for at, _ in parts]
        split = torch.split(held, len(self._stages))
        return [torch.cat([n[r], t.to(n.device)]) for n, r, t in zip(norms, rest, split, strict=True)]

    def combine(self, each: Tensor, where: Sequence[int], p: float) -> Tensor:
        """Return what values of gradients come to: a p-norm; of order 1, a sum.

        Args:
            each: A value for each gradient, or a row of them for each kind of value.
            where: The gradients.
            p: The order.
        """
        flat = each.flatten().to(torch.float64)
        layouts = [self._layouts[i] for i in where] * (len(flat) // max(1, len(where)))
        norms = self._reduction.sum(flat, layouts) if p == 1 else self._reduction.norms(flat, [p] * len(flat), layouts)
        return norms.view(each.shape).to(each.device)

    def combine_slices(self, slices: Sequence[Tensor], where: Sequence[int], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of the part here."""
        along = [self._layouts[i].along(each) for i, each in zip(where, dims, strict=True)]
        split = [k for k, layout in enumerate(along) if layout.shards]
        whole = list(slices)
        if split:
            flat = torch.cat([slices[k].flatten().to(torch.float64) for k in split])
            layouts = [along[k] for k in split for _ in range(slices[k].numel())]
            joined = self._reduction.norms(flat, [2.0] * len(flat), layouts)
            for k, each in zip(split, torch.split(joined, [slices[k].numel() for k in split]), strict=True):
                whole[k] = each.view(slices[k].shape).to(slices[k].device)
        return whole

    def require_same_places(self, where: Sequence[int]) -> None:
        """Raise in all processes where copies of a gradient are not finite in different places."""
        marks = {i: checksum(_measure.nonfinite(self.values[i]).to(torch.uint8)) % _EXACT + 1 for i in where}
        staged = [[marks[i] for i in where if i in stage.members] for stage in self._stages]
        of_stages = [fingerprint(each) % _EXACT + 1 if each else 0 for each in staged]
        layouts = [*(self._layouts[i] for i in where), *(stage.copies for stage in self._stages)]
        every = torch.tensor([*map(float, marks.values()), *map(float, of_stages)], dtype=torch.float64)
        self._reduction.require_same(every, layouts, _DIFFERENT_PLACES)

    def write_back(self, where: Sequence[int]) -> None:
        """Write changed values of partial gradients back, as summands that add up to them."""
        for i in self._partial.keys() & set(where):
            self.local[i].copy_(self.values[i]) if self._partial[i] else self.local[i].zero_()

    def is_plain_shard(self, i: int) -> bool:
        """Return whether a plain tensor is a part of a gradient: it does not say which, nor how large the whole is."""
        return -1 in self._layouts[i].dims

    def cannot_hold(self, i: int) -> bool:
        """Return whether elements of a summand share memory, so that what it is reduced to does not fit there."""
        return i in self._partial and shares_memory(self.local[i])

    def weight(self, i: int, parameter: Any) -> Tensor:
        """Return what is held of a parameter, which must lie as its gradient does."""
        if not is_dtensor(parameter):
            plain: Tensor = parameter.detach()
            return plain
        dims = [kind.dim for kind in parameter.placements if not (kind.is_replicate() or kind.is_partial())]
        if dims != [dim for dim in self._layouts[i].dims if dim >= 0]:
            raise UnsupportedGradientError(
                f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}, its gradient "
                "has others, and this policy compares the two. Redistribute the gradient before clipping."
            )
        return stored_shards([parameter])[0].detach()
