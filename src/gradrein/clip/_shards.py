"""Where gradients lie that are sharded, replicated or partial over ranks, and what this rank holds of them.

Deadlock freedom: the collectives a rank issues depend only on its parameters, never on which gradients are present.
Meshes are visited in an order that is the same on every rank, and the dimensions of each in its own.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed.agreement import Agreement
from .._distributed.fingerprints import fingerprint, parameter_fingerprints
from .._distributed.meshes import Group, MeshGroups, order_meshes
from .._measure import shares_memory
from .._torch.dtensor import is_dtensor, specs_of, stored_parts, stored_shards
from .._torch.storage import repeats
from ..distributed import Placement, Replicated, Sharded
from ..errors import UnsupportedGradientError
from ._apply import writing
from ._norm_exchange import WHAT
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
    sharded_patterns,
    wide_ones,
    writes_partial,
)
from ._shared_memory import refuse_other_layout, repeated_dtensors

_PARTIAL = "the parameters, or which gradients are partial (a missing one is not: give it zeros that are)"


class AbsentCopy(NamedTuple):
    """A parameter that `placement` says has copies, without a gradient on this rank."""

    pattern: int
    fingerprint: int


def absent_copies(
    names: Sequence[str] | None,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    patterns: Sequence[tuple[Placement, ...]],
    pattern_of: Sequence[int],
) -> dict[str, AbsentCopy]:
    """Return the copies in plain tensors that have no gradient here, by name, or by index where they have none.

    A frozen parameter has none anywhere.
    """
    copied = [any(isinstance(each, Replicated) for each in placements) for placements in patterns]
    lacking = [i for i, g in enumerate(grads) if g is None and copied[pattern_of[i]]]
    where = [i for i in lacking if parameters[i].requires_grad and not is_dtensor(parameters[i])]
    sharded = sharded_patterns(patterns)
    numbers = parameter_fingerprints(None, [parameters[i] for i in where], [sharded[pattern_of[i]] for i in where])
    found = zip(where, numbers, strict=True)
    return {str(i) if names is None else names[i]: AbsentCopy(pattern_of[i], number) for i, number in found}


class Shards:
    """Where the shards of the gradients of one call are.

    Args:
        parameters: The parameters.
        grads: The gradient of each; None where this rank has none.
        patterns: The placements that were given for plain tensors.
        pattern_of: For each parameter the index of its pattern.
        names: Their names, or None.
        call: What this rank was called with: the same words on every rank.
        unmeasured: Nothing is measured later, so ranks would not notice that they differ in which are partial.
        writes_values: Elements are changed one by one, and not only scaled, with nothing measured before.

    Attributes:
        grads: The gradients; None where this rank has none, or only one in the memory of another.
        local: This rank's shard of each gradient, to be written to; empty where this rank has none.
        values: The same, to be measured: partial gradients are reduced.
        places: Where gradients lie, each place once.
        place_of: For each gradient the index of its place.
        wide: Those whose values may be out of the range of float32.
        missing_copies: Those that have copies, and none on this rank.
        fingerprints: A number for each parameter, the same on every rank.
        unnamed: The same without the names, where `Replicated` compares copies.
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
        writes_values: bool = False,
    ) -> None:
        self.call, self.unmeasured, self.writes_values = call, unmeasured, writes_values
        self.patterns, self._names = patterns, names
        self.pattern_of = list(pattern_of or [0] * len(grads))
        self._sharded_patterns = sharded_patterns(patterns)
        sharded = [self._sharded_patterns[n] for n in self.pattern_of] if any(self._sharded_patterns) else ()
        self.fingerprints = parameter_fingerprints(names, parameters, sharded)
        copied = any(isinstance(each, Replicated) for placements in patterns for each in placements)
        self.unnamed = parameter_fingerprints(None, parameters, sharded) if copied else ()
        self._writes_partial: dict[int, bool] = {}
        self._layouts: dict[tuple[int, Any], ShardLayout] = {}
        with torch.no_grad():
            self._read(parameters, grads)
            grads = self.grads = self._each_memory_once(grads)
            layouts = [(number, layout) for number, (layout, _) in enumerate(self.places) if layout is not None]
            replicas = {number for number, layout in layouts if not all(layout.sharded)}
            self.missing_copies = {i for i in self.at(replicas) if grads[i] is None}
            self.values = [*self.local]
            partial = {number for number, layout in layouts if layout.partial}
            reducible = [i for i in self.at(partial) if grads[i] is not None]
            unclear = partial.intersection(self.place_of[i] for i, *_ in self._in_one_memory)
            # The gradient of a parameter with copies may be partial on ranks that have it, which wait for this one.
            if reducible or unclear or (unmeasured and has_copies(parameters)):
                self._agree_on_partial(set(reducible))
            for i in reducible:
                self.values[i] = reduced(grads[i])
                self._writes_partial[i] = writes_partial(grads[i])

    def at(self, places: Collection[int]) -> list[int]:
        """Return the gradients that lie in one of these places."""
        return [i for i, place in enumerate(self.place_of) if place in places] if places else []

    def _agree_on_partial(self, partial: set[int]) -> None:
        """Compare the parameters before partial gradients are reduced, in messages of their own sizes."""
        agreement, error = Agreement(WHAT, self.call), None
        try:
            self.refuse_unclear_memory(partial_only=True)
            if self.writes_values:
                self.refuse_shared_elements(partial)
        except UnsupportedGradientError as raised:  # the others wait for this rank
            error = raised
            agreement.fail(f"{type(raised).__name__}: {raised}")
        on_meshes = [number for number, (layout, _) in enumerate(self.places) if layout is not None]
        for group, sharded, _ in self.groups(agreement):
            # Without `placement` all of them, so that ranks outside of a slice of their mesh hear of a fault in it.
            compared_at = self.at(sharded if self.has_placement else on_meshes)
            found = [(self.fingerprints[i], i in partial) for i in compared_at]
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
        self.wide = wide_ones(parameters, own, self.local)
        mesh, numbers, n = one_mesh(own, specs), self.pattern_of, len(specs)
        placements = [spec.placements for spec in specs] if mesh is not None else []
        if mesh is not None and placements.count(placements[0]) == numbers.count(numbers[0]) == n:
            places: list[Place] = [(self._layout(mesh, placements[0]), numbers[0])]
            self.places, self.place_of = places, [0] * n
        else:
            self.places, self.place_of = self._read_places(own, specs)

    def _each_memory_once(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients without DTensors in the memory of another."""
        pairs = repeats(self.local)
        repeated = repeated_dtensors(pairs, self.layout_at)
        self._in_one_memory = [(i, grads[i], kept, grads[kept]) for i, kept in {**pairs, **repeated}.items()]
        for i in repeated:
            self.local[i] = self.local[i].new_empty(0)
        return [None if i in repeated else g for i, g in enumerate(grads)] if repeated else [*grads]

    def _read_places(self, own: Sequence[Any], specs: Sequence[Any]) -> tuple[list[Place], list[int]]:
        """Return the places there are, and for each gradient which of them is its."""
        places: dict[Place, int] = {}
        seen: dict[tuple[int, int, int], int] = {}
        found = []
        for parameter, spec, number in zip(own, specs, self.pattern_of, strict=True):
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

    def layout_at(self, i: int) -> ShardLayout | None:
        """Return how a gradient lies on its mesh; None for a plain tensor."""
        return self.places[self.place_of[i]][0]

    @property
    def has_placement(self) -> bool:
        """Whether `placement=` was given: ranks may then hold different parameters."""
        return any(self.patterns)

    def is_whole(self, i: int) -> bool:
        """Return whether this rank holds the whole gradient as a plain tensor."""
        return self.layout_at(i) is None and self.numel_known(i)

    def numel_known(self, i: int) -> bool:
        """Return whether the tensor knows the size of the whole: a shard in a plain tensor does not."""
        return not self._sharded_patterns[self.pattern_of[i]]

    def write_back_partial(self, where: Sequence[int]) -> None:
        """Write changed `values` of partial gradients back as partial ones that reduce to them."""
        with torch.no_grad():
            for i in self._writes_partial.keys() & set(where):
                with writing([self.local[i]]):
                    self.local[i].copy_(self.values[i]) if self._writes_partial[i] else self.local[i].zero_()

    def refuse_unclear_memory(self, partial_only: bool = False) -> None:
        """Raise where it is not clear how memory that several gradients share counts.

        Args:
            partial_only: Only where one of them is partial.
        """
        for i, grad, kept, other in self._in_one_memory:
            place, place_of_other = self.places[self.place_of[i]], self.places[self.place_of[kept]]
            if not partial_only or any(layout is not None and layout.partial for layout, _ in (place, place_of_other)):
                refuse_other_layout(grad, place, other, place_of_other, self.patterns)

    def refuse_shared_elements(self, where: Iterable[int]) -> None:
        """Raise where a partial gradient cannot hold what it is reduced to: its elements share memory."""
        for i in where:
            layout = self.layout_at(i)
            if layout is not None and layout.partial and shares_memory(self.local[i]):
                raise UnsupportedGradientError(
                    f"{self.label(i)} is partial, and this rank stores several of its elements in the same memory, as "
                    f"an expanded tensor does (shape {tuple(self.local[i].shape)}, strides {self.local[i].stride()}). "
                    "Clone it first."
                )

    def label(self, i: int) -> str:
        """Return a gradient by its name, or by its number where it has none."""
        return f"gradient {i}" if self._names is None else self._names[i]

    def missing_on_parts(self, mesh: MeshGroups | None) -> list[str] | None:
        """Return which gradients are missing here that do not lie on all ranks of a mesh; None if all do.

        Ranks that such a gradient does not lie on do not hear of its norm. With `placement` ranks may hold different
        parameters: there the slices of the mesh are meant.
        """
        if mesh is None or (self.has_placement and len(mesh.groups) == 1):
            return None
        ranks = set(mesh.ranks)
        parts = {
            number
            for number, (layout, _) in enumerate(self.places)
            if layout is not None
            and not ranks.issubset(layout.mesh.ranks)
            and (mesh.contains(layout.mesh) or not self.has_placement)
        }
        if not parts and not self.has_placement:
            return None
        return [self.label(i) for i in self.at(parts) if self.grads[i] is None]

    @property
    def crosses(self) -> bool:
        """Whether two meshes each have ranks that the other lacks: not all hear of what is found in the last one."""
        ranks = [set(mesh.ranks) for mesh, _ in order_meshes(layout.mesh for layout in self._layouts.values())]
        return any(not a <= b and not b <= a for a, b in combinations(ranks, 2))

    def weight(self, i: int, parameter: Any) -> Tensor:
        """Return what this rank holds of a parameter, which must lie as its gradient does."""
        layout = self.layout_at(i)
        if layout is None:
            found: Tensor = parameter.detach()
            return found
        if cut_dims(parameter.placements) != layout.dims:
            raise UnsupportedGradientError(
                f"a parameter of shape {tuple(parameter.shape)} has placements {parameter.placements}, its gradient "
                "has others, and this policy compares the two. Redistribute the gradient before clipping."
            )
        return stored_shards([parameter])[0].detach()

    def groups(self, exchange: Agreement | None = None) -> Iterator[tuple[Group, dict[int, bool], MeshGroups | None]]:
        """Yield process groups in order, with the places on each and whether they are sharded over it (else copied).

        Also yield the mesh that the group is of; None for one of `placement`.

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
                        for number, (layout, _) in enumerate(self.places)
                        if layout is not None and layout.mesh in submeshes and group in layout.mesh.groups
                    },
                    mesh,
                )
            if exchange is not None and exchange.disagreed:
                told.update(mesh.ranks)
        for group in groups_of_patterns(self.patterns, (Sharded,)):
            over = [group in groups_of_patterns([placements], (Sharded,)) for placements in self.patterns]
            places = {number: True for number, (_, pattern) in enumerate(self.places) if over[pattern]}
            yield group, places, None
