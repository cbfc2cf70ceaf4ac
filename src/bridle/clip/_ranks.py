"""Where the pieces of each gradient are, and what their norms come to over all ranks.

Why nothing waits for ever: which groups are joined follows from the parameters, not from who happens to have a
gradient. Meshes are gone through in an order that is the same on every rank, and the dimensions of each in its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedGradientError
from . import _measure
from ._exchange import Exchange, Group, Mesh, group_of, guarded, plan, read_mesh, ready
from ._fingerprint import combined, fingerprints
from ._groups import Mark, Replicated, Sharded, Stages

__all__ = ["Part", "Ranks", "absent", "spans"]

Part: TypeAlias = tuple[Sequence[int], float]
"""Gradients that share a policy, by index, and the order of its norm."""


def _dtensor() -> type[Any] | None:
    """DTensor, if anyone can have one: it is not imported here."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def _is_spread(t: Any) -> bool:
    kind = _dtensor()
    return kind is not None and isinstance(t, kind)


def spans(tensors: Iterable[Tensor | None]) -> bool:
    """Is any of them a DTensor? A program of one process is answered without looking at them."""
    if not dist.is_available() or not dist.is_initialized() or (kind := _dtensor()) is None:
        return False
    return any(issubclass(t, kind) for t in set(map(type, tensors)))


def absent(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    patterns: Sequence[tuple[Mark, ...]],
    pattern_of: Sequence[int],
) -> list[int]:
    """Parameters without a gradient here that lie on several ranks, each once: the others may have one."""
    cut = [any(isinstance(mark, Sharded) for mark in marks) for marks in patterns]
    first: dict[int, int] = {}
    for i, (p, g) in enumerate(zip(parameters, grads, strict=True)):
        if g is None and (cut[pattern_of[i]] or _is_spread(p)):
            first.setdefault(id(p), i)
    return list(first.values())


@dataclass(frozen=True)
class _Layout:
    mesh: Mesh
    pieces: tuple[bool, ...]  # for each dimension of the mesh: do its ranks hold pieces, or copies?
    partial: bool


class Ranks:
    """Where the pieces of the gradients of one call are.

    Attributes:
        local: the piece of each gradient on this rank, to be written to; empty where this rank has none.
        values: the same, to be measured: what is partial has been reduced.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        patterns: Sequence[tuple[Mark, ...]] = ((),),
        pattern_of: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        call: str = "",
    ) -> None:
        self._call = call
        self.local: list[Tensor] = []
        self._patterns = patterns
        self._pattern_of = pattern_of or [0] * len(grads)
        cut = [any(isinstance(mark, Sharded) for mark in marks) for marks in patterns]
        pieces = [cut[n] for n in self._pattern_of] if any(cut) else ()
        self._fingerprints = fingerprints(names, parameters, pieces)
        self._speaks: dict[int, bool] = {}
        self._layouts: dict[tuple[int, Any], _Layout] = {}
        self._layout_of: dict[int, _Layout] = {}
        with torch.no_grad():
            self._read(parameters, grads)
            self.values = [*self.local]
            partial = any(layout.partial for layout in self._layouts.values())
            for i, layout in self._layout_of.items() if partial else ():
                if layout.partial and grads[i] is not None:
                    self.values[i] = _reduced(grads[i])
                    self._speaks[i] = _first_of_partial(grads[i])

    def _read(self, parameters: Sequence[Any], grads: Sequence[Any]) -> None:
        """Note what this rank has of each gradient, and the layout of each DTensor. Neighbours mostly share theirs."""
        kind, last = _dtensor() or (), (None, None)
        layout: Any = None
        for i, (p, g) in enumerate(zip(parameters, grads, strict=True)):
            t = p if g is None else g
            if isinstance(t, kind):
                mesh, placements = t.device_mesh, t.placements
                if mesh is not last[0] or placements != last[1]:
                    layout, last = self._layout(mesh, placements), (mesh, placements)
                self._layout_of[i] = layout
                if p is not t and getattr(p, "device_mesh", mesh) is not mesh:
                    _refuse_other_mesh(p, t)
                t = t.to_local()
                if type(t) is not Tensor:
                    t = ready(t)
            self.local.append(t.detach().new_empty(0) if g is None else t)

    def _layout(self, mesh: Any, placements: Any) -> _Layout:
        found = self._layouts.get((id(mesh), placements))
        if found is None:
            found = self._layouts[id(mesh), placements] = _read_layout(mesh, placements)
        return found

    @property
    def marked(self) -> bool:
        """Was anything said in `groups=`? Then ranks may hold different parameters."""
        return any(self._patterns)

    def whole(self, i: int) -> bool:
        """Does this rank hold the whole gradient as a plain tensor?"""
        return i not in self._layout_of and self.size_known(i)

    def size_known(self, i: int) -> bool:
        """Or is it a piece of something whose size the tensor does not tell?"""
        return not any(isinstance(mark, Sharded) for mark in self._patterns[self._pattern_of[i]])

    def settle(self, where: Sequence[int]) -> None:
        """Write changed `values` of partial gradients back as partial ones that reduce to them."""
        with torch.no_grad():
            for i in self._speaks.keys() & set(where):
                self.local[i].copy_(self.values[i]) if self._speaks[i] else self.local[i].zero_()

    def measure(self, parts: Sequence[Part]) -> list[tuple[Tensor, Tensor]]:
        """For each part the norm of each of its gradients, and values whose norm is that of all, on every rank."""
        found = [_measure.norms([self.values[i] for i in where], p) for where, p in parts]
        sizes = [len(n) for n in found]
        with torch.no_grad():
            each = torch.cat([n.to(found[0].device) for n in found])
            where = [i for listed, _ in parts for i in listed]
            exchange = Exchange(self._call)
            each = self._combine(exchange, each, where, [p for listed, p in parts for _ in listed])
            norms = [n.to(own.device) for n, own in zip(torch.split(each, sizes), found, strict=True)]
            summands = self._with_apart(exchange, norms, parts)
            exchange.finish()
            return list(zip(norms, summands, strict=True))

    def combine(self, each: Tensor, where: Sequence[int], orders: list[float]) -> Tensor:
        """What values of some gradients on this rank come to, over all ranks that hold pieces or copies of them."""
        exchange = Exchange(self._call)
        found = self._combine(exchange, each, where, orders)
        exchange.finish()
        return found

    def _combine(self, exchange: Exchange, each: Tensor, where: Sequence[int], orders: list[float]) -> Tensor:
        at = {i: k for k, i in enumerate(where)}
        for group, entries in self._spread_over():
            here = [(i, pieces) for i, pieces in entries if i in at]
            what = combined(self._fingerprints[i] for i, _ in here)
            exchange.share(each, [(at[i], pieces) for i, pieces in here], orders, group, what)
        return each

    def _spread_over(self) -> Iterator[tuple[Group, list[tuple[int, bool]]]]:
        """The groups that pieces lie on, in order, with the gradients on each: in pieces, or else in copies?"""
        for mesh, riders in plan(layout.mesh for layout in self._layouts.values()):
            for group in mesh.groups:
                on = {
                    id(layout): layout.pieces[layout.mesh.groups.index(group)]
                    for layout in self._layouts.values()
                    if layout.mesh in riders and group in layout.mesh.groups
                }
                yield group, [(i, on[id(layout)]) for i, layout in self._layout_of.items() if id(layout) in on]
        for group in _groups_of(self._patterns, (Sharded,)):
            over = [group in _groups_of([marks], (Sharded,)) for marks in self._patterns]
            yield group, [(i, True) for i, number in enumerate(self._pattern_of) if over[number]]

    def _with_apart(self, exchange: Exchange, norms: list[Tensor], parts: Sequence[Part]) -> list[Tensor]:
        """For each part, the norms of its gradients with what other ranks hold beside them, each counted once."""
        numbers = [n for n, marks in enumerate(self._patterns) if any(not isinstance(m, Sharded) for m in marks)]
        if not numbers:
            return norms
        slots = [(k, n) for k in range(len(parts)) for n in numbers]
        mine = [[j for j, i in enumerate(parts[k][0]) if self._pattern_of[i] == n] for k, n in slots]
        orders = [parts[k][1] for k, _ in slots]
        found = [_measure.total(norms[k][m], p) for (k, _), m, p in zip(slots, mine, orders, strict=True)]
        apart = torch.stack([n.to(norms[0].device) for n in found])
        for group in _groups_of(self._patterns, (Stages, Replicated)):
            stages = {n for n in numbers if group in _groups_of([self._patterns[n]], (Stages,))}
            copies = {n for n in numbers if group in _groups_of([self._patterns[n]], (Replicated,))}
            listed = [(s, n in stages) for s, (_, n) in enumerate(slots) if n in stages | copies]
            copied = [0 if pieces else len(mine[s]) for s, pieces in listed]
            exchange.share(apart, listed, orders, group, counts=copied)
        alone = [[j for j, i in enumerate(where) if self._pattern_of[i] not in numbers] for where, _ in parts]
        others = torch.split(apart, len(numbers))
        return [torch.cat([n[a], o.to(n.device)]) for n, a, o in zip(norms, alone, others, strict=True)]


def _read_layout(mesh: Any, placements: Sequence[Any]) -> _Layout:
    partial = any(kind.is_partial() for kind in placements)
    return _Layout(read_mesh(mesh), tuple(not (k.is_replicate() or k.is_partial()) for k in placements), partial)


def _groups_of(patterns: Iterable[tuple[Mark, ...]], kinds: tuple[type, ...]) -> list[Group]:
    """The process groups that marks of some kinds are about, each once, in order."""
    found: dict[Group, None] = {}
    for mark in (m for marks in patterns for m in marks if isinstance(m, kinds)):
        group: Any = mark.group
        if isinstance(group, dist.ProcessGroup):
            found[group_of(group)] = None
        else:
            found.update(dict.fromkeys(read_mesh(group).groups))
    return list(found)


def _reduced(grad: Any) -> Tensor:
    """The local piece of a partial gradient after reducing it: communication of its whole size."""
    from torch.distributed.tensor import Replicate

    for kind in grad.placements:
        if kind.is_partial() and kind.reduce_op not in ("sum", "avg", "max", "min"):
            raise UnsupportedGradientError(
                f"a gradient of shape {tuple(grad.shape)} is partial by {kind.reduce_op!r}, which scaling its pieces "
                "does not scale. Redistribute it before clipping."
            )
    settled = [Replicate() if kind.is_partial() else kind for kind in grad.placements]
    group = grad.device_mesh.get_group(next(d for d, kind in enumerate(grad.placements) if kind.is_partial()))
    return ready(guarded(lambda: grad.detach().redistribute(placements=settled).to_local(), group))


def _first_of_partial(grad: Any) -> bool:
    """Does this rank write the value of a partial gradient? Of a sum, one rank does, and the others write zeros."""
    place = zip(grad.device_mesh.get_coordinate(), grad.placements, strict=True)
    return all(at == 0 for at, kind in place if kind.is_partial() and kind.reduce_op == "sum")


def _refuse_other_mesh(parameter: Any, t: Any) -> None:
    if parameter.device_mesh != t.device_mesh:
        raise UnsupportedGradientError(
            f"a gradient of shape {tuple(t.shape)} lies on {t.device_mesh}, its parameter on {parameter.device_mesh}. "
            "Redistribute the gradient to the parameter's mesh before clipping."
        )
