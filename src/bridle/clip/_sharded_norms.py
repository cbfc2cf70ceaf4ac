"""Norms of gradients that are sharded, replicated or partial over ranks.

Deadlock freedom: the collectives a rank issues depend only on its parameters, never on which gradients are present.
Meshes are visited in an order that is the same on every rank, and the dimensions of each in its own.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _measure
from .._distributed.agreement import Agreement
from .._distributed.checksums import checksum
from .._distributed.fingerprints import combine_fingerprints, fingerprint, parameter_fingerprints
from .._distributed.meshes import Group, order_meshes
from .._torch.dtensor import specs_of, stored_parts, stored_shards
from .._torch.storage import repeats
from ..distributed import Disjoint, Placement, Replicated, Sharded
from ..errors import BridleError, UnsupportedGradientError
from ._norm_exchange import WHAT, Kind, NormExchange
from ._shard_layouts import (
    Place,
    ShardLayout,
    cut_dims,
    groups_of_patterns,
    has_copies,
    one_mesh,
    other_mesh,
    read_layout,
    reduced,
    refuse_counted_twice,
    sharded_patterns,
    wide_ones,
    writes_partial,
)
from ._shared_memory import refuse_other_layout, repeated_dtensors

_EXACT = 2**52  # float64 holds integers of this size
_DIFFERENT_PLACES = (
    "ranks {} hold copies of one gradient that are not finite in different places, such as on some of them only: to "
    'zero these values would leave copies that differ. Pass nonfinite="raise", which names them, or "skip".'
)
_PARTIAL = "the parameters, or which gradients are partial (a missing one is not: give it zeros that are)"
_COPIES_LAST = (
    "which gradients are missing that have copies over a later dimension of the mesh than shards (a sum of shards on "
    "one rank then lacks what a copy of them has: give them zeros, or redistribute)"
)
_LACKING = "which copies have no gradient ({} learns from each of them: give those a gradient of zeros)"
Part: TypeAlias = tuple[Sequence[int], float]
"""Gradients that share a policy, by index, and the order of its norm."""


class ShardedNorms:
    """Where the shards of the gradients of one call are.

    Args:
        parameters: The parameters.
        grads: The gradient of each; None where this rank has none.
        patterns: The placements that were given for plain tensors.
        pattern_of: For each parameter the index of its pattern.
        names: Their names, or None.
        call: What this rank was called with: the same words on every rank.
        unmeasured: Nothing is measured later, so ranks would not notice that they differ in which are partial.

    Attributes:
        grads: The gradients; None where this rank has none, or only one in the memory of another.
        local: This rank's shard of each gradient, to be written to; empty where this rank has none.
        values: The same, to be measured: partial gradients are reduced.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        patterns: Sequence[tuple[Placement, ...]] = ((),),
        pattern_of: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        call: str = "",
        unmeasured: bool = False,
    ) -> None:
        self._call, self._unmeasured = call, unmeasured
        self._patterns = patterns
        self._pattern_of = list(pattern_of or [0] * len(grads))
        self._sharded_patterns = sharded_patterns(patterns)
        sharded = [self._sharded_patterns[n] for n in self._pattern_of] if any(self._sharded_patterns) else ()
        self._fingerprints = parameter_fingerprints(names, parameters, sharded)
        copied = any(isinstance(each, Replicated) for placements in patterns for each in placements)
        self._unnamed = parameter_fingerprints(None, parameters, sharded) if copied else ()
        self._writes_partial: dict[int, bool] = {}
        self._learned_from: dict[int, tuple[str, str]] = {}
        self._layouts: dict[tuple[int, Any], ShardLayout] = {}
        with torch.no_grad():
            self._read(parameters, grads)
            grads = self.grads = self._each_memory_once(grads)
            layouts = [(number, layout) for number, (layout, _) in enumerate(self._places) if layout is not None]
            replicas = {number for number, layout in layouts if not all(layout.sharded)}
            self._missing_copies = {i for i in self._at(replicas) if grads[i] is None}
            self.values = [*self.local]
            partial = {number for number, layout in layouts if layout.partial}
            reducible = [i for i in self._at(partial) if grads[i] is not None]
            unclear = partial.intersection(self._place_of[i] for i, *_ in self._in_one_memory)
            # The gradient of a parameter with copies may be partial on ranks that have it, which wait for this one.
            if reducible or unclear or (unmeasured and has_copies(parameters)):
                self._agree_on_partial(set(reducible))
            for i in reducible:
                self.values[i] = reduced(grads[i])
                self._writes_partial[i] = writes_partial(grads[i])

    def _at(self, places: Collection[int]) -> list[int]:
        """Return the gradients that lie in one of these places."""
        return [i for i, place in enumerate(self._place_of) if place in places] if places else []

    def _agree_on_partial(self, partial: set[int]) -> None:
        """Compare the parameters before partial gradients are reduced, in messages of their own sizes."""
        agreement, error = Agreement(WHAT, self._call), None
        try:
            self._refuse_unclear_memory(partial_only=True)
        except UnsupportedGradientError as raised:  # the others wait for this rank
            error = raised
            agreement.fail(f"{type(raised).__name__}: {raised}")
        on_meshes = [number for number, (layout, _) in enumerate(self._places) if layout is not None]
        for group, sharded in self._groups(agreement):
            # Without `placement` all of them, so that ranks outside of a slice of their mesh hear of a fault in it.
            compared_at = self._at(sharded if self.has_placement else on_meshes)
            found = [(self._fingerprints[i], i in partial) for i in compared_at]
            compared = {_PARTIAL: fingerprint(found)}
            if group.group.size() > 1:
                agreement.all_reduce(torch.zeros(0, dtype=torch.float64), group, {}, compared)
        if error is not None:
            raise error
        agreement.finish()

    def _read(self, parameters: Sequence[Any], grads: Sequence[Any]) -> None:
        """Note this rank's shard of each gradient, and where each lies: mostly all lie alike."""
        held = [p if g is None else g for p, g in zip(parameters, grads, strict=True)]
        specs, own = specs_of(held), specs_of(parameters)
        local = stored_parts(held, specs)
        self.local = [t.detach().new_empty(0) if g is None else t for t, g in zip(local, grads, strict=True)]
        self._wide = wide_ones(parameters, own, self.local)
        mesh, numbers, n = one_mesh(own, specs), self._pattern_of, len(specs)
        placements = [spec.placements for spec in specs] if mesh is not None else []
        if mesh is not None and placements.count(placements[0]) == numbers.count(numbers[0]) == n:
            places: list[Place] = [(self._layout(mesh, placements[0]), numbers[0])]
            self._places, self._place_of = places, [0] * n
        else:
            self._places, self._place_of = self._read_places(own, specs)

    def _each_memory_once(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients without DTensors in the memory of another."""
        pairs = repeats(self.local)
        repeated = repeated_dtensors(pairs, self._layout_at)
        self._in_one_memory = [(i, grads[i], kept, grads[kept]) for i, kept in {**pairs, **repeated}.items()]
        for i in repeated:
            self.local[i] = self.local[i].new_empty(0)
        return [None if i in repeated else g for i, g in enumerate(grads)] if repeated else [*grads]

    def _read_places(self, own: Sequence[Any], specs: Sequence[Any]) -> tuple[list[Place], list[int]]:
        """Return the places there are, and for each gradient which of them is its."""
        places: dict[Place, int] = {}
        seen: dict[tuple[int, int, int], int] = {}
        found = []
        for parameter, spec, number in zip(own, specs, self._pattern_of, strict=True):
            # The mesh of the parameter: torch may give a gradient an equal one that was made before.
            mesh = None if spec is None else spec.mesh if parameter is None else parameter.mesh
            key = (id(mesh), id(spec and spec.placements), number)
            if key not in seen or (spec and mesh is not spec.mesh):
                if spec and mesh != spec.mesh:
                    raise other_mesh(parameter, spec)
                layout = None if spec is None else self._layout(mesh, spec.placements)
                seen[key] = places.setdefault((layout, number), len(places))
            found.append(seen[key])
        return list(places), found

    def _layout(self, mesh: Any, placements: Any) -> ShardLayout:
        found = self._layouts.get((id(mesh), placements))
        if found is None:
            found = self._layouts[id(mesh), placements] = read_layout(mesh, placements)
        return found

    def _layout_at(self, i: int) -> ShardLayout | None:
        return self._places[self._place_of[i]][0]

    @property
    def has_placement(self) -> bool:
        """Whether `placement=` was given: ranks may then hold different parameters."""
        return any(self._patterns)

    def is_whole(self, i: int) -> bool:
        """Return whether this rank holds the whole gradient as a plain tensor."""
        return self._layout_at(i) is None and self.numel_known(i)

    def numel_known(self, i: int) -> bool:
        """Return whether the tensor knows the size of the whole: a shard in a plain tensor does not."""
        return not self._sharded_patterns[self._pattern_of[i]]

    def write_back_partial(self, where: Sequence[int]) -> None:
        """Write changed `values` of partial gradients back as partial ones that reduce to them."""
        with torch.no_grad():
            for i in self._writes_partial.keys() & set(where):
                self.local[i].copy_(self.values[i]) if self._writes_partial[i] else self.local[i].zero_()

    def measure(self, parts: Sequence[Part], merged: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Return for each part the norm of each of its gradients, and terms whose norm is that of all ranks.

        Args:
            parts: The gradients, and the orders of their norms.
            merged: Measure gradients that are sharded alike as one, where only the norm of all is asked for: what is
                sent then does not grow with their number.
        """
        sets = [self._merged(where) if merged else [[i] for i in where] for where, _ in parts]
        exchange, error = NormExchange(self._call), None
        try:
            refuse_counted_twice(self._places, self._patterns)
            self._refuse_unclear_memory()
            found = [self._own_norms(each, p) for each, (_, p) in zip(sets, parts, strict=True)]
        except BridleError as raised:  # the others wait for this rank
            error, found = raised, [torch.zeros(len(each), dtype=torch.float64) for each in sets]
            exchange.fail(f"{type(raised).__name__}: {raised}")
        with torch.no_grad():
            each = torch.cat([n.to(found[0].device) for n in found])
            kinds = self._kinds(sets, [p for _, p in parts])
            spoiled = self._combine(exchange, each, [members for each in sets for members in each], kinds)
            norms = [n.to(own.device) for n, own in zip(torch.split(each, list(map(len, sets))), found, strict=True)]
            terms = self._norm_terms(exchange, norms, sets, [p for _, p in parts])
            if spoiled is not None:
                terms = [torch.cat([t, spoiled.to(t.device)]) for t in terms]
        if error is not None:
            raise error
        exchange.finish()
        return list(zip(norms, terms, strict=True))

    def _refuse_unclear_memory(self, partial_only: bool = False) -> None:
        """Raise where it is not clear how memory that several gradients share counts.

        Args:
            partial_only: Only where one of them is partial.
        """
        for i, grad, kept, other in self._in_one_memory:
            place, place_of_other = self._places[self._place_of[i]], self._places[self._place_of[kept]]
            if not partial_only or any(layout is not None and layout.partial for layout, _ in (place, place_of_other)):
                refuse_other_layout(grad, place, other, place_of_other, self._patterns)

    def tell(self, parts: Sequence[Part], error: Exception) -> None:
        """Tell the other ranks, which are about to measure these parts, that this one has raised an error."""
        if self._unmeasured:
            return
        exchange = NormExchange(self._call)
        exchange.fail(f"{type(error).__name__}: {error}")
        sets = [[[i] for i in where] for where, _ in parts]
        norms = [torch.zeros(len(each), dtype=torch.float64) for each in sets]
        every = [members for each in sets for members in each]
        self._combine(exchange, torch.cat(norms), every, [Kind(2.0, False)] * len(every))
        self._norm_terms(exchange, norms, sets, [p for _, p in parts])

    def combine(self, each: Tensor, where: Sequence[int], p: float, beside: str = "") -> Tensor:
        """Return what values of some gradients come to over all ranks that hold shards or copies of them.

        Args:
            each: A value for each gradient, or several: a row for each kind of value.
            where: The gradients.
            p: The order of the norm they are terms of; of order 1 they are added up, and may be negative.
            beside: What else must be the same on every rank, in words.
        """
        exchange, found = NormExchange(self._call + beside), each.flatten().to(torch.float64)
        sets = [[i] for i in where] * (len(found) // max(1, len(where)))
        self._combine(exchange, found, sets, [self._kind(members, p) for members in sets])
        exchange.finish()
        return found.view(each.shape)

    def require_copies(self, keys: Mapping[int, str], policy: str) -> None:
        """Let the next exchange raise on all ranks where one of these that has copies is missing on some of them only.

        Args:
            keys: What each is called on every rank, by index.
            policy: Who keeps a memory of each copy.
        """
        self._learned_from.update((i, (_LACKING.format(policy), key)) for i, key in keys.items())

    def _copies_lacking(self, compared: Sequence[int]) -> dict[str, str]:
        """Return which copies are missing on this rank that all have to be there, or none, in words.

        The same on all ranks of a mesh, not only on those that hold copies of each other: what the groups of its last
        dimension find, others would not hear of.
        """
        found: dict[str, list[str]] = {}
        for i in compared:
            if i in self._learned_from:
                what, key = self._learned_from[i]
                found.setdefault(what, []).extend([key] if i in self._missing_copies else [])
        if any(layout is not None and layout.copies_last for layout, _ in self._places):
            layouts = ((i, self._layout_at(i)) for i in compared if i in self._missing_copies)
            found[_COPIES_LAST] = [f"gradient {i}" for i, layout in layouts if layout and layout.copies_last]
        return {what: ", ".join(keys) or "none" for what, keys in found.items()}

    def require_same_places(self, where: Sequence[int]) -> None:
        """Raise on all ranks where copies of a gradient are not finite in different places."""
        exchange = NormExchange(self._call)
        for group, sharded in self._groups(exchange):
            marks = [self._mark(i) for i in where if sharded.get(self._place_of[i]) is False]
            exchange.require_same(marks, group, _DIFFERENT_PLACES.format(dist.get_process_group_ranks(group.group)))
        for group in groups_of_patterns(self._patterns, (Replicated,)):
            over = [n for n, each in enumerate(self._patterns) if group in groups_of_patterns([each], (Replicated,))]
            marks = [self._mark_all([i for i in where if self._pattern_of[i] == n]) for n in over]
            exchange.require_same(marks, group, _DIFFERENT_PLACES.format(dist.get_process_group_ranks(group.group)))
        exchange.finish()

    def _mark(self, i: int) -> int:
        """Return a number for the places where a copy is not finite; 0 where this rank has none."""
        if i in self._missing_copies:
            return 0
        return int(checksum(_measure.nonfinite(self.values[i]).to(torch.uint8))) % _EXACT + 1

    def _mark_all(self, members: Sequence[int]) -> int:
        """Return a number for the places where copies are not finite, in the order they are listed; 0 for none."""
        return combine_fingerprints(map(self._mark, members)) % _EXACT + 1 if members else 0

    def combine_slices(self, slices: Sequence[Tensor], where: Sequence[int], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices of which this rank knows the norm of its own part.

        Args:
            slices: For each gradient a tensor of norms.
            where: The gradients.
            dims: For each the dimensions that its slices run along.
        """
        exchange, found = NormExchange(self._call), [t.to(torch.float64).flatten() for t in slices]
        groups = [(group, places) for group, places in self._groups() if group.group.size() > 1]
        cuts = [[self._cut_dims(i, group) & dims[k] for group, _ in groups] for k, i in enumerate(where)]
        split = [k for k, each in enumerate(cuts) if any(each)]

        def replace(some: list[int], every: Tensor) -> None:
            for k, part in zip(some, torch.split(every, [len(found[k]) for k in some]), strict=True):
                found[k] = part

        for group, sharded in groups:  # before shards are added up: of copies, one that has a gradient is enough
            copied = [k for k in split if sharded.get(self._place_of[where[k]]) is False]
            if copied:
                every = torch.cat([found[k] for k in copied]).nan_to_num(math.inf, math.inf)  # both are left unscaled
                replace(copied, exchange.again(every, group, largest=True))
        for n, (group, _) in enumerate(groups):
            cut = [k for k in split if cuts[k][n]]
            if cut:
                every = torch.cat([found[k] for k in cut])
                by = torch.ones_like(every)
                if any(where[k] in self._wide for k in cut):
                    by = _measure.safe_divisor(exchange.again(every.nan_to_num(0.0, math.inf), group, largest=True))
                replace(cut, exchange.again((every / by).square(), group).sqrt() * by)
        exchange.finish()
        return [t.view(own.shape).to(own.device) for t, own in zip(found, slices, strict=True)]

    def _cut_dims(self, i: int, group: Group) -> set[int]:
        layout = self._layout_at(i)
        return set() if layout is None else layout.cut_dims(group)

    def weight(self, i: int, parameter: Any) -> Tensor:
        """Return what this rank holds of a parameter, which must lie as its gradient does."""
        layout = self._layout_at(i)
        if layout is None:
            found: Tensor = parameter.detach()
            return found
        if cut_dims(parameter.placements) != layout.dims:
            raise UnsupportedGradientError(
                f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}, its gradient "
                "has others, and this policy compares the two. Redistribute the gradient before clipping."
            )
        return stored_shards([parameter])[0].detach()

    def _own_norms(self, sets: Sequence[Sequence[int]], p: float) -> Tensor:
        """Return the norm of what this rank holds of each set of gradients."""
        where = [i for members in sets for i in members]
        norms = _measure.norms([self.values[i] for i in where], p)
        if len(where) == len(sets):
            return norms
        return torch.stack([_measure.total(each, p) for each in torch.split(norms, list(map(len, sets)))])

    def _merged(self, where: Sequence[int]) -> list[list[int]]:
        """Return sets of gradients that are sharded alike, and by itself each that is copied over some dimension."""
        sets: dict[Any, list[int]] = {}
        for i in where:
            layout = self._layout_at(i)
            alone = i if layout is not None and not all(layout.sharded) else -1
            sets.setdefault((self._place_of[i], alone), []).append(i)
        return list(sets.values())

    def _kinds(self, sets: Sequence[Sequence[Sequence[int]]], orders: Sequence[float]) -> list[Kind]:
        if self._wide:
            return [self._kind(members, p) for each, p in zip(sets, orders, strict=True) for members in each]
        return [kind for each, p in zip(sets, orders, strict=True) for kind in [Kind(p, False)] * len(each)]

    def _kind(self, members: Sequence[int], p: float) -> Kind:
        return Kind(p, not self._wide.isdisjoint(members))

    def _combine(
        self, exchange: NormExchange, each: Tensor, sets: Sequence[Sequence[int]], kinds: Sequence[Kind]
    ) -> Tensor | None:
        """Replace values of sets of gradients by what they come to over all ranks that hold shards or copies.

        Returns:
            A value that is not finite if one of a rank is not that others do not see: that of a plain tensor, which is
            taken to be the same everywhere. All ranks then know. None if there is none.
        """
        places = [self._place_of[members[0]] for members in sets]  # those of a set share theirs
        listed = list(dict.fromkeys(chain.from_iterable(sets)))
        bad = each[each.isfinite().logical_not()].sum().reshape(1)
        values = torch.cat([each, bad])
        for group, sharded in self._groups(exchange):
            entries = {k: sharded[place] for k, place in enumerate(places) if place in sharded}
            # Without `placement` ranks list the same everywhere.
            compared = [i for i in listed if self._place_of[i] in sharded] if self.has_placement else listed
            lacking = self._missing_copies and [k for k in entries if sets[k][0] in self._missing_copies]
            exchange.reduce_norms(
                values,
                {**entries, len(sets): True} if entries else {},
                [*kinds, kinds[0]],
                group,
                parameters=combine_fingerprints(self._fingerprints[i] for i in compared),
                count=len(compared),
                missing=list(lacking),
                beside=self._copies_lacking(compared),
            )
        each.copy_(values[:-1])
        readable = values.device.type == "cpu"
        return values[-1:] if readable and not math.isfinite(values[-1]) and bool(each.isfinite().all()) else None

    def _groups(self, exchange: Agreement | None = None) -> Iterator[tuple[Group, dict[int, bool]]]:
        """Yield process groups in order, with the places on each and whether they are sharded over it (else copied).

        Once all ranks of a mesh know of a fault in the exchange, meshes of no other ranks are left out.
        """
        meshes, told = order_meshes(layout.mesh for layout in self._layouts.values()), set[int]()
        for mesh, submeshes in meshes:
            if told.issuperset(mesh.ranks):
                continue
            for group in mesh.groups:
                yield (
                    group,
                    {
                        number: layout.sharded[layout.mesh.groups.index(group)]
                        for number, (layout, _) in enumerate(self._places)
                        if layout is not None and layout.mesh in submeshes and group in layout.mesh.groups
                    },
                )
            if exchange is not None and exchange.disagreed:
                told.update(mesh.ranks)
        for group in groups_of_patterns(self._patterns, (Sharded,)):
            over = [group in groups_of_patterns([placements], (Sharded,)) for placements in self._patterns]
            yield group, {number: True for number, (_, pattern) in enumerate(self._places) if over[pattern]}

    def _norm_terms(
        self,
        exchange: NormExchange,
        norms: list[Tensor],
        sets: Sequence[Sequence[Sequence[int]]],
        orders: Sequence[float],
    ) -> list[Tensor]:
        """Return for each part its norms and those of parameters on other ranks, each counted once."""
        numbers = [n for n, each in enumerate(self._patterns) if any(not isinstance(m, Sharded) for m in each)]
        if not numbers:
            return norms
        slots = [(k, n) for k in range(len(sets)) for n in numbers]
        mine = [[j for j, members in enumerate(sets[k]) if self._pattern_of[members[0]] == n] for k, n in slots]
        found = [_measure.total(norms[k][at], orders[k]) for (k, _), at in zip(slots, mine, strict=True)]
        totals = torch.stack([n.to(norms[0].device) for n in found])
        held = [[i for j in at for i in sets[k][j]] for (k, _), at in zip(slots, mine, strict=True)]
        kinds = [self._kind(members, orders[k]) for (k, _), members in zip(slots, held, strict=True)]
        for group in groups_of_patterns(self._patterns, (Disjoint, Replicated)):
            disjoint = {n for n in numbers if group in groups_of_patterns([self._patterns[n]], (Disjoint,))}
            copied = {n for n in numbers if group in groups_of_patterns([self._patterns[n]], (Replicated,))}
            entries = {s: n in disjoint for s, (_, n) in enumerate(slots) if n in disjoint | copied}
            copies = [0 if apart else self._copies_held(held[s]) for s, apart in entries.items()]
            exchange.add_stages(totals, entries, kinds, group, copies)
        rest = [[j for j, each in enumerate(part) if self._pattern_of[each[0]] not in numbers] for part in sets]
        split = torch.split(totals, len(numbers))
        return [torch.cat([n[r], t.to(n.device)]) for n, r, t in zip(norms, rest, split, strict=True)]

    def _copies_held(self, members: Sequence[int]) -> int:
        """Return a number for copies that this rank holds, whatever their names and order: 0 for none."""
        return combine_fingerprints(sorted(self._unnamed[i] for i in members)) % _EXACT + 1 if members else 0
