"""The gradients of one call: measured when a policy asks, once per order of the norm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from .. import _devices, _measure
from .._torch.dtensor import grads_of
from .._torch.storage import plain
from ..distributed import PlacementSpec
from ..errors import UnsupportedGradientError
from ._parameters import live_names, warn_raw_gradients
from ._placement import placements_of
from ._shard_layouts import missing_here, on_several_ranks
from ._sharded_norms import ShardedNorms
from ._shards import AbsentCopy, Shards, absent_copies
from ._shared_memory import placed_again

_T = TypeVar("_T")
_UNNAMED: dict[int, str] = {}  # to make them takes four times as long as to look them up; the same in any thread


def unnamed(indices: list[int]) -> list[str]:
    """Return what parameters without unique names are remembered by."""
    if torch.compiler.is_compiling():  # what is traced changes nothing outside
        return [f"parameter {i}" for i in indices]
    try:
        return [_UNNAMED[i] for i in indices]
    except KeyError:
        _UNNAMED.update((i, f"parameter {i}") for i in indices)
        return [_UNNAMED[i] for i in indices]


def _pick(values: list[_T], where: list[int]) -> list[_T]:
    """Return the values at indices that are in order, each once."""
    return values if len(where) == len(values) else [values[i] for i in where]


class Gradients:
    """Parameters that have a gradient, each once, with their gradients and norms: a `GradientView` for policies.

    Attributes:
        parameters: The parameters.
        tensors: The gradient of each (empty where there is none on this rank).
        known_names: Their names, or None where the target had none.
        target_names: The names of all parameters of the target, with a gradient or without.
        pattern: The name pattern that selected them: what a policy with a memory remembers a whole group by.
        sharded: Where their shards are, or None where all of them belong to this process alone.
        local: What this rank holds of each, to be written to.
        values: What this rank holds of each, to be measured.
        absent: The parameters that `placement` says have copies, and that have no gradient on this rank, by name.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        tensors: list[Tensor],
        known_names: list[str] | None = None,
        target_names: list[str] | None = None,
        sharded: ShardedNorms | None = None,
        where: Sequence[int] = (),
        indices: list[int] | None = None,
        absent: Mapping[str, AbsentCopy] | None = None,
    ) -> None:
        self.parameters = parameters
        self.absent = absent or {}
        self.tensors = tensors
        self.known_names = known_names
        self.target_names = target_names
        self.pattern = "*"
        self._indices = indices
        self.sharded = sharded
        self.local = tensors if sharded is None else [sharded.shards.local[i] for i in where]
        self.values = tensors if sharded is None else [sharded.shards.values[i] for i in where]
        self._where = where
        self._readable: bool | None = None
        self._norms: dict[float, Tensor] = {}
        self._norm_terms: dict[float, Tensor] = {}
        self._totals: dict[float, Tensor] = {}

    @classmethod
    def of(
        cls,
        names: list[str] | None,
        parameters: list[Tensor],
        placement: PlacementSpec | None = None,
        call: Callable[[], str] = str,
        *,
        unmeasured: bool = False,
        writes_values: bool = False,
    ) -> Gradients:
        """Return the gradients that parameters have."""
        found = grads_of(parameters)
        if not any(g is not None for g in found):
            warn_raw_gradients(parameters)
        return cls.from_pairs(
            names, parameters, found, placement, call, unmeasured=unmeasured, writes_values=writes_values
        )

    @classmethod
    def from_pairs(
        cls,
        names: list[str] | None,
        parameters: list[Tensor],
        found: list[Tensor | None],
        placement: PlacementSpec | None = None,
        call: Callable[[], str] = str,
        *,
        unmeasured: bool = False,
        writes_values: bool = False,
    ) -> Gradients:
        """Return these gradients of these parameters; `call` describes the call, for other ranks to compare."""
        first = {id(g): i for i, g in reversed(list(enumerate(found))) if g is not None}
        kept = sorted(first.values())
        sharded = None
        absent: dict[str, AbsentCopy] = {}
        if placement is not None or on_several_ranks(parameters) or on_several_ranks(found):
            patterns, pattern_of = placements_of(placement, names, len(parameters))
            if len(kept) < len(found):
                unclear = placed_again(found, first, patterns, pattern_of)
                kept = sorted([*kept, *missing_here(parameters, found, patterns, pattern_of), *unclear])
            known = None if names is None else _pick(names, kept)
            own, present, numbers = _pick(parameters, kept), _pick(found, kept), _pick(pattern_of, kept)
            shards = Shards(own, present, patterns, numbers, known, call(), unmeasured, writes_values)
            grads = [shard if g is None else g for g, shard in zip(shards.grads, shards.local, strict=True)]
            sharded = ShardedNorms(shards)
            absent = absent_copies(names, parameters, found, patterns, pattern_of)
        else:
            grads = [g for g in [found[i] for i in kept] if g is not None]
        names_are_unique = names is not None and len(set(names)) == len(names)
        indices = None if names_are_unique else kept
        known = None if names is None else _pick(names, kept)
        return cls(_pick(parameters, kept), grads, known, names, sharded, range(len(kept)), indices, absent)

    def subset(self, where: Sequence[int], pattern: str = "*", absent: Collection[str] = ()) -> Gradients:
        """Return some of them, and some of the copies that are absent here."""
        names = None if self.known_names is None else [self.known_names[i] for i in where]
        parameters, tensors = [self.parameters[i] for i in where], [self.tensors[i] for i in where]
        indices = None if self._indices is None else [self._indices[i] for i in where]
        inside = [] if self.sharded is None else [self._where[i] for i in where]
        kept = {name: self.absent[name] for name in absent}
        part = Gradients(parameters, tensors, names, None, self.sharded, inside, indices, kept)
        part.pattern = pattern
        return part

    def names(self) -> list[str]:
        """Return a name for each: the target's own, else that of the live module that owns the parameter."""
        return live_names(self.parameters) if self.known_names is None else self.known_names

    def keys(self) -> list[str]:
        """Return what to remember each by from step to step: its name, or its index where names are not unique."""
        if self._indices is None:
            return self.names()
        return unnamed(self._indices)

    def norms(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of each gradient, over all ranks: a float64 vector on the device of the first."""
        if p not in self._norms:
            measure_together([(self, p)])
        return self._norms[p]

    def norm_terms(self, p: float = 2.0) -> Tensor:
        """Return a vector whose p-norm is that of all gradients: their norms, and the contribution of other ranks."""
        if p not in self._norms:
            measure_together([(self, p)])
        return self._norm_terms[p]

    def total_norm(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of all gradients as one vector: a 0-dim tensor."""
        if p not in self._totals:
            with torch.no_grad():
                self._totals[p] = _measure.total(self.norm_terms(p), p)
        return self._totals[p]

    def measure_total(self, p: float) -> Tensor:
        """Return the same where nothing else is asked: gradients that are sharded alike are measured as one."""
        if self.sharded is None or p in self._norms:
            return self.total_norm(p)
        ((_, terms),) = self.sharded.measure([(self._where, p)], merged=True)
        with torch.no_grad():
            return _measure.total(terms, p)

    def numels(self) -> list[int]:
        """Return how many elements each gradient has, over all ranks."""
        for k, i in enumerate(self._where if self.sharded is not None else ()):
            if self.sharded is not None and not self.sharded.shards.numel_known(i):
                raise UnsupportedGradientError(
                    f"{self.names()[k]} is Sharded by `placement`, and this policy divides by the total number of "
                    "elements, which a plain tensor does not know. Use a DTensor, or another policy for it."
                )
        return [p.numel() for p in self.parameters]

    def refuse_disjoint(self, policy: str) -> None:
        """Raise if other ranks hold other parameters, for a policy that each rank would decide for itself."""
        if self.sharded is not None and self.sharded.shards.has_placement:
            raise UnsupportedGradientError(
                f"{policy} compares gradients with parameters, and `placement` says that ranks hold different "
                "parameters: each rank would decide for itself. Use a policy that uses norms only, such as ByMedian."
            )

    def refuse_plain_shards(self, policy: str) -> None:
        """Raise if a gradient is a shard in a plain tensor, for a policy that looks inside gradients."""
        for k, i in enumerate(self._where if self.sharded is not None else ()):
            if self.sharded is not None and not self.sharded.shards.numel_known(i):
                raise UnsupportedGradientError(
                    f"{policy} compares parts of a gradient, and that of {self.names()[k]} is Sharded by `placement`: "
                    "a plain tensor does not know which part of the whole it is. Use a DTensor, or by_norm for it."
                )

    def refuse_shared_elements(self) -> None:
        """Raise if a partial gradient cannot hold what it is reduced to, for policies that change single elements."""
        if self.sharded is not None:
            self.sharded.shards.refuse_shared_elements(self._where)

    def require_copies(self, policy: str, *, of_norms: bool = False) -> None:
        """Raise on all ranks, when norms are exchanged, if a gradient that has copies is missing on some of them."""
        if self.sharded is not None:
            keys = {} if of_norms else dict(zip(self._where, self.keys(), strict=True))
            self.sharded.require_copies(keys, policy, self.absent.values())

    def weights(self) -> list[Tensor]:
        """Return what this rank holds of each parameter."""
        if self.sharded is None:
            return [p.detach() for p in self.parameters]
        return [self.sharded.shards.weight(i, p) for i, p in zip(self._where, self.parameters, strict=True)]

    def spans_ranks(self) -> bool:
        """Return whether some of the gradients lie on several ranks."""
        return self.sharded is not None

    def over_ranks(self, each: Tensor, p: float = 1.0) -> Tensor:
        """Return what values of each gradient on this rank come to over all ranks: a p-norm; of order 1, a sum."""
        if self.sharded is None:
            return each
        if p != 1:
            return self.sharded.combine(each, self._where, p).to(each.device)
        parts = torch.stack([each.clamp(min=0), -each.clamp(max=0)])  # of copies, the largest may be taken
        found = self.sharded.combine(parts, self._where, p).to(each.device)
        return found[0] - found[1]

    def slices_over_ranks(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of this rank's part."""
        return [*slices] if self.sharded is None else self.sharded.combine_slices(slices, self._where, dims)

    def count_nonfinite(self) -> Tensor:
        """Return how many values of each are NaN or infinite, over all ranks: a vector on the device of the first."""
        return self._counted(_measure.count_nonfinite(self.values))

    def _counted(self, here: Tensor, beside: str = "") -> Tensor:
        if self.sharded is None:
            return here
        found = self.sharded.combine(here, self._where, 1.0, beside)
        return (found - 1e-6).ceil()  # of copies it is the mean: one that is not finite on some ranks only counts too

    def _in_copies(self, here: Tensor) -> dict[str, int]:
        """Return the counts of plain gradients, which should be the same on every rank, where there are any."""
        if self.sharded is None or self.sharded.shards.has_placement or not self.readable_now():
            return {}
        found = zip(self._where, self.names(), here.tolist(), strict=True)
        return {name: int(n) for i, name, n in found if n and self.sharded.shards.is_whole(i)}

    def why_not_finite(self) -> str:
        """Explain a norm that is not finite where no gradient is known to hold such a value."""
        elsewhere = "a gradient on another rank is not finite, or " if self.sharded is not None else ""
        return elsewhere + _measure.TOO_LARGE

    def write_back_partial(self) -> None:
        """Make changes to `values` changes to `local`."""
        if self.sharded is not None:
            self.sharded.shards.write_back_partial(self._where)

    def invalidate(self) -> None:
        """Measure again when asked next: the gradients have been changed."""
        self._norms.clear()
        self._norm_terms.clear()
        self._totals.clear()

    def readable_now(self) -> bool:
        """Return whether values can be read without waiting for a device."""
        if self._readable is None:
            self._readable = _devices.readable_now(self.local)
        return self._readable


def measure_together(parts: Sequence[tuple[Gradients, float]]) -> None:
    """Measure parts of one call, each in its own norm, with one exchange between ranks for all of them."""
    sharded = parts[0][0].sharded if parts else None
    if sharded is None:
        for grads, p in parts:
            grads._norms[p] = grads._norm_terms[p] = plain(_measure.norms(grads.tensors, p))
        return
    found = sharded.measure([(grads._where, p) for grads, p in parts])
    for (grads, p), (norms, terms) in zip(parts, found, strict=True):
        grads._norms[p], grads._norm_terms[p] = norms, terms


def count_alike(parts: Sequence[Gradients]) -> list[Tensor]:
    """Count as `count_nonfinite`, and raise on all ranks where copies hold such values in different places.

    Of copies in plain tensors the numbers of such values are compared.
    To zero such values would leave copies that differ, under different norms.
    """
    here = [_measure.count_nonfinite(part.values) for part in parts]
    copies = {name: n for part, each in zip(parts, here, strict=True) for name, n in part._in_copies(each).items()}
    beside = f" with values that are not finite in plain gradients: {copies}"
    found = [part._counted(each, beside) for part, each in zip(parts, here, strict=True)]
    sharded = parts[0].sharded if parts else None
    if sharded is not None and all(part.readable_now() for part in parts):
        counts = [n for each in found for n in each.tolist()]
        sharded.require_same_places([i for part in parts for i in part._where], counts)
    return found


@contextmanager
def refusals_told(parts: Sequence[tuple[Gradients, float]]) -> Iterator[None]:
    """Tell other ranks, which go on to measure these parts, about an error that this one raises in the block."""
    try:
        yield
    except Exception as error:
        sharded = parts[0][0].sharded if parts else None
        if sharded is not None:
            sharded.tell([(grads._where, p) for grads, p in parts], error)
        raise
