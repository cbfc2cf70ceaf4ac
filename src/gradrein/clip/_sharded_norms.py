"""Norms of gradients that are sharded, replicated or partial over ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _measure
from .._distributed.checksums import checksum
from .._distributed.fingerprints import combine_fingerprints, fingerprint
from .._distributed.meshes import Group, MeshGroups
from ..distributed import Disjoint, Replicated, Sharded
from ..errors import GradreinError
from ._norm_exchange import Kind, NormExchange
from ._shard_layouts import groups_of_patterns, refuse_counted_twice
from ._shards import AbsentCopy, Shards

_EXACT = 2**52  # float64 holds integers of this size
_DIFFERENT_PLACES = (
    "ranks {} hold copies of one gradient that are not finite in different places, such as on some of them only: to "
    'zero these values would leave copies that differ. Pass nonfinite="raise", which names them, or "skip".'
)
_COPIES_LAST = (
    "which gradients are missing that have copies over a later dimension of the mesh than shards (a sum of shards on "
    "one rank then lacks what a copy of them has: give them zeros, or redistribute)"
)
_PARTS = (
    "which gradients are missing that lie on a part of the ranks only, such as a slice of a mesh (the other ranks do "
    "not hear of their norm: give them zeros)"
)
_COUNTED = "how many values of each gradient are not finite (to zero them would leave different norms)"
_LACKING = "which copies have no gradient ({} learns from each of them: give those a gradient of zeros)"
Part: TypeAlias = tuple[Sequence[int], float]
"""Gradients that share a policy, by index, and the order of its norm."""


class ShardedNorms:
    """What the ranks find together about the gradients of one call.

    Args:
        shards: Where they lie.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self._learned_from: dict[int, tuple[str, str]] = {}
        self._absent: dict[int, list[int]] = {}

    def measure(self, parts: Sequence[Part], merged: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Return for each part the norm of each of its gradients, and terms whose norm is that of all ranks.

        Args:
            parts: The gradients, and the orders of their norms.
            merged: Measure gradients that are sharded alike as one, where only the norm of all is asked for: what is
                sent then does not grow with their number.
        """
        sets = [self._merged(where) if merged else [[i] for i in where] for where, _ in parts]
        exchange, error = NormExchange(self.shards.call), None
        try:
            refuse_counted_twice(self.shards.places, self.shards.patterns)
            self.shards.refuse_unclear_memory()
            found = [self._own_norms(each, p) for each, (_, p) in zip(sets, parts, strict=True)]
        except GradreinError as raised:  # the others wait for this rank
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

    def tell(self, parts: Sequence[Part], error: Exception) -> None:
        """Tell the other ranks, which are about to measure these parts, that this one has raised an error."""
        if self.shards.unmeasured:
            return
        exchange = NormExchange(self.shards.call)
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
        exchange, found = NormExchange(self.shards.call + beside), each.flatten().to(torch.float64)
        sets = [[i] for i in where] * (len(found) // max(1, len(where)))
        self._combine(exchange, found, sets, [self._kind(members, p) for members in sets])
        exchange.finish()
        return found.view(each.shape)

    def require_copies(self, keys: Mapping[int, str], policy: str, absent: Iterable[AbsentCopy]) -> None:
        """Let the next exchange raise on all ranks where one of these that has copies is missing on some of them only.

        Args:
            keys: What each is called on every rank, by index.
            policy: Who keeps a memory of each copy.
            absent: Copies in plain tensors that have no gradient here.
        """
        for copy in absent:
            self._absent.setdefault(copy.pattern, []).append(copy.fingerprint)
        self._learned_from.update((i, (_LACKING.format(policy), key)) for i, key in keys.items())

    def _lacking(self, compared: Sequence[int], mesh: MeshGroups | None) -> dict[str, str]:
        """Return which gradients are missing on this rank that all ranks of a mesh have to have, or none, in words.

        The same on all ranks of a mesh, not only on those that hold copies of each other: what the groups of its last
        dimension find, others would not hear of.
        """
        found: dict[str, list[str]] = {}
        for i in compared:
            if i in self._learned_from:
                what, key = self._learned_from[i]
                found.setdefault(what, []).extend([key] if i in self.shards.missing_copies else [])
        places = [self.shards.places[number][0] for number in {self.shards.place_of[i] for i in compared}]
        if any(layout is not None and layout.copies_last for layout in places):
            layouts = ((i, self.shards.layout_at(i)) for i in compared if i in self.shards.missing_copies)
            found[_COPIES_LAST] = [self.shards.label(i) for i, layout in layouts if layout and layout.copies_last]
        on_parts = self.shards.missing_on_parts(mesh)
        if on_parts is not None:
            found[_PARTS] = on_parts
        return {what: ", ".join(keys) or "none" for what, keys in found.items()}

    def require_same_places(self, where: Sequence[int], counts: Sequence[float]) -> None:
        """Raise on all ranks where copies of a gradient are not finite in different places.

        Args:
            where: The gradients.
            counts: How many values of each are not finite, as all ranks should have found.
        """
        exchange = NormExchange(self.shards.call)
        for group, sharded, _ in self.shards.groups(exchange):
            marks = [self._mark(i) for i in where if sharded.get(self.shards.place_of[i]) is False]
            exchange.require_same(marks, group, _DIFFERENT_PLACES.format(dist.get_process_group_ranks(group.group)))
        for group in groups_of_patterns(self.shards.patterns, (Replicated,)):
            over = [
                n for n, each in enumerate(self.shards.patterns) if group in groups_of_patterns([each], (Replicated,))
            ]
            marks = [self._mark_all([i for i in where if self.shards.pattern_of[i] == n]) for n in over]
            exchange.require_same(marks, group, _DIFFERENT_PLACES.format(dist.get_process_group_ranks(group.group)))
        # Ranks that hold none of these copies have to hear of it too.
        found = list(zip(where, counts, strict=True))
        for group, _, mesh in self.shards.groups():
            exchange.tell([group], compared={_COUNTED: self._fingerprint_of_counts(found, mesh)})
        if self.shards.crosses:
            exchange.tell([group for group, *_ in self.shards.groups()])
        exchange.tell(self._groups_of_stages())
        exchange.finish()

    def _fingerprint_of_counts(self, found: Sequence[tuple[int, float]], mesh: MeshGroups | None) -> int:
        """Return a number for counts that all ranks of a mesh have; with `placement`, those of gradients on it."""
        if not self.shards.has_placement:
            return fingerprint([n for _, n in found])
        layouts = [(i, n, self.shards.layout_at(i)) for i, n in found]
        lie = [(i, n) for i, n, layout in layouts if mesh is not None and layout and mesh.contains(layout.mesh)]
        return fingerprint([(self.shards.label(i), n) for i, n in lie])

    def _told(self, exchange: NormExchange, bad: Tensor) -> Tensor:
        """Return a value that is not finite where it is so on any rank: in a second round all hear of the first."""
        flag = bad.isfinite().logical_not().to(torch.float64)
        for group, *_ in self.shards.groups():
            flag = exchange.all_reduce(flag, group, {}, {}, largest=True).to(flag.device)
        return torch.where(flag > 0, math.nan, bad)

    def _mark(self, i: int) -> int:
        """Return a number for the places where a copy is not finite; 0 where this rank has none."""
        if i in self.shards.missing_copies:
            return 0
        return int(checksum(_measure.nonfinite(self.shards.values[i]).to(torch.uint8))) % _EXACT + 1

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
        exchange, found = NormExchange(self.shards.call), [t.to(torch.float64).flatten() for t in slices]
        groups = [(group, places) for group, places, _ in self.shards.groups() if group.group.size() > 1]
        cuts = [[self._cut_dims(i, group) & dims[k] for group, _ in groups] for k, i in enumerate(where)]
        split = [k for k, each in enumerate(cuts) if any(each)]

        def replace(some: list[int], every: Tensor) -> None:
            for k, part in zip(some, torch.split(every, [len(found[k]) for k in some]), strict=True):
                found[k] = part

        for group, sharded in groups:  # before shards are added up: of copies, one that has a gradient is enough
            copied = [k for k in split if sharded.get(self.shards.place_of[where[k]]) is False]
            if copied:
                every = torch.cat([found[k] for k in copied]).nan_to_num(math.inf, math.inf)  # both are left unscaled
                replace(copied, exchange.again(every, group, largest=True))
        for n, (group, _) in enumerate(groups):
            cut = [k for k in split if cuts[k][n]]
            if cut:
                every = torch.cat([found[k] for k in cut])
                by = torch.ones_like(every)
                if any(where[k] in self.shards.wide for k in cut):
                    by = _measure.safe_divisor(exchange.again(every.nan_to_num(0.0, math.inf), group, largest=True))
                replace(cut, exchange.again((every / by).square(), group).sqrt() * by)
        exchange.finish()
        return [t.view(own.shape).to(own.device) for t, own in zip(found, slices, strict=True)]

    def _cut_dims(self, i: int, group: Group) -> set[int]:
        layout = self.shards.layout_at(i)
        return set() if layout is None else layout.cut_dims(group)

    def _own_norms(self, sets: Sequence[Sequence[int]], p: float) -> Tensor:
        """Return the norm of what this rank holds of each set of gradients."""
        where = [i for members in sets for i in members]
        norms = _measure.norms([self.shards.values[i] for i in where], p)
        if len(where) == len(sets):
            return norms
        return torch.stack([_measure.total(each, p) for each in torch.split(norms, list(map(len, sets)))])

    def _merged(self, where: Sequence[int]) -> list[list[int]]:
        """Return sets of gradients that are sharded alike, and by itself each that is copied over some dimension."""
        sets: dict[Any, list[int]] = {}
        for i in where:
            layout = self.shards.layout_at(i)
            alone = i if layout is not None and not all(layout.sharded) else -1
            sets.setdefault((self.shards.place_of[i], alone), []).append(i)
        return list(sets.values())

    def _kinds(self, sets: Sequence[Sequence[Sequence[int]]], orders: Sequence[float]) -> list[Kind]:
        if self.shards.wide:
            return [self._kind(members, p) for each, p in zip(sets, orders, strict=True) for members in each]
        return [kind for each, p in zip(sets, orders, strict=True) for kind in [Kind(p, False)] * len(each)]

    def _kind(self, members: Sequence[int], p: float) -> Kind:
        return Kind(p, not self.shards.wide.isdisjoint(members))

    def _combine(
        self, exchange: NormExchange, each: Tensor, sets: Sequence[Sequence[int]], kinds: Sequence[Kind]
    ) -> Tensor | None:
        """Replace values of sets of gradients by what they come to over all ranks that hold shards or copies.

        Returns:
            A value that is not finite if one of a rank is not that others do not see: that of a plain tensor, which is
            taken to be the same everywhere. All ranks then know. None if there is none.
        """
        places = [self.shards.place_of[members[0]] for members in sets]  # those of a set share theirs
        listed = list(dict.fromkeys(chain.from_iterable(sets)))
        bad = each[each.isfinite().logical_not()].sum().reshape(1)
        values = torch.cat([each, bad])
        for group, sharded, mesh in self.shards.groups(exchange):
            entries = {k: sharded[place] for k, place in enumerate(places) if place in sharded}
            # Without `placement` ranks list the same everywhere.
            compared = (
                [i for i in listed if self.shards.place_of[i] in sharded] if self.shards.has_placement else listed
            )
            lacking = self.shards.missing_copies and [k for k in entries if sets[k][0] in self.shards.missing_copies]
            exchange.reduce_norms(
                values,
                {**entries, len(sets): True} if entries else {},
                [*kinds, kinds[0] if kinds else Kind(2.0, False)],
                group,
                parameters=combine_fingerprints(self.shards.fingerprints[i] for i in compared),
                count=len(compared),
                missing=list(lacking),
                beside=self._lacking(compared, mesh),
            )
        if self.shards.crosses:
            values[-1:] = self._told(exchange, values[-1:])
        each.copy_(values[:-1])
        readable = values.device.type == "cpu"
        return values[-1:] if readable and not math.isfinite(values[-1]) and bool(each.isfinite().all()) else None

    def _norm_terms(
        self,
        exchange: NormExchange,
        norms: list[Tensor],
        sets: Sequence[Sequence[Sequence[int]]],
        orders: Sequence[float],
    ) -> list[Tensor]:
        """Return for each part its norms and those of parameters on other ranks, each counted once."""
        numbers = [n for n, each in enumerate(self.shards.patterns) if any(not isinstance(m, Sharded) for m in each)]
        if not numbers:
            return norms
        slots = [(k, n) for k in range(len(sets)) for n in numbers]
        mine = [[j for j, members in enumerate(sets[k]) if self.shards.pattern_of[members[0]] == n] for k, n in slots]
        found = [_measure.total(norms[k][at], orders[k]) for (k, _), at in zip(slots, mine, strict=True)]
        totals = torch.stack([n.to(norms[0].device) for n in found])
        held = [[i for j in at for i in sets[k][j]] for (k, _), at in zip(slots, mine, strict=True)]
        kinds = [self._kind(members, orders[k]) for (k, _), members in zip(slots, held, strict=True)]
        for group in self._groups_of_stages():
            disjoint = {n for n in numbers if group in groups_of_patterns([self.shards.patterns[n]], (Disjoint,))}
            copied = {n for n in numbers if group in groups_of_patterns([self.shards.patterns[n]], (Replicated,))}
            entries = {s: n in disjoint for s, (_, n) in enumerate(slots) if n in disjoint | copied}
            copies = [0 if apart else self._copies_held(held[s], slots[s][1]) for s, apart in entries.items()]
            exchange.add_stages(totals, entries, kinds, group, copies)
        rest = [[j for j, each in enumerate(part) if self.shards.pattern_of[each[0]] not in numbers] for part in sets]
        split = torch.split(totals, len(numbers))
        return [torch.cat([n[r], t.to(n.device)]) for n, r, t in zip(norms, rest, split, strict=True)]

    def _groups_of_stages(self) -> list[Group]:
        """Return the groups of plain tensors, those of copies first: other stages hear of a fault among copies."""
        kinds: tuple[type, ...] = (Replicated, Disjoint)
        return list(dict.fromkeys(g for kind in kinds for g in groups_of_patterns(self.shards.patterns, (kind,))))

    def _copies_held(self, members: Sequence[int], pattern: int) -> int:
        """Return a number for copies that this rank holds, whatever their names and order: 0 for none.

        Where a policy learns from each, those without a gradient count too.
        """
        held, absent = sorted(self.shards.unnamed[i] for i in members), sorted(self._absent.get(pattern, ()))
        if not held and not absent:
            return 0
        return combine_fingerprints([*held, -1, *absent] if absent else held) % _EXACT + 1
