"""Short random projections of per-sample gradients, and inner products between those of two batches.

Projections are the same for the same seed, names and shapes wherever they are computed. Signs and buckets come from a
counter-based hash: 32-bit words in int64, whose products stay below 2**63, so that no result depends on overflow, on a
generator of torch or on a device. They are made when needed and never stored.
"""

import itertools
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._validate import count
from ...errors import ArgumentError
from ..representations.base import CHUNK_BYTES, Outer, SampleGrads, Sum, in_chunks
from ..representations.conv import Convolved
from ..representations.members import Members
from ..representations.numerics import as_rows, double, inner_products, row_norms, upcast_half
from ..representations.rows import Rows

_WORD = 0xFFFFFFFF
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FEW = 1024  # numbers of a parameter that its fingerprint is made of
_AT_ONCE = 1 << 16  # words that are hashed at once, which stay in the cache
_BLOCK = 1 << 20  # numbers whose buckets are made at once where those of all would take too much memory
_Factors: TypeAlias = tuple[Tensor | None, Tensor | None]


def plain_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name of each parameter without what DDP, FSDP, checkpoints and torch.compile add to it."""
    plain = list(names)
    for wrapper in _WRAPPERS:
        plain = [name.replace(wrapper, "") for name in plain]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return dict(zip(names, plain, strict=True))


def _keys(*parts: object) -> tuple[int, int]:
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _hash_(counters: Tensor, keys: tuple[int, int]) -> Tensor:
    """Replace counters by random words of 32 bits, in place."""
    for words in torch.split(counters, _AT_ONCE if counters.device.type == "cpu" else max(1, len(counters))):
        words.bitwise_xor_((words >> 32) * 0x2C1B3C6D).bitwise_xor_(keys[0]).bitwise_and_(_WORD)  # some are above 2**32
        words.bitwise_xor_(words >> 16).mul_(0x21F0AAAD).bitwise_and_(_WORD).bitwise_xor_(keys[1])
        words.bitwise_xor_(words >> 15).mul_(0x735A2D97).bitwise_and_(_WORD)
        words.bitwise_xor_(words >> 15)
    return counters


def fingerprint(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return a number that changes when the values do, from at most 1,024 numbers of each tensor; it is not read."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name in sorted(tensors):
        flat = as_rows(tensors[name].detach()[None])[0]
        few = flat[:: max(1, -(-len(flat) // _FEW))].contiguous()
        bits = few.view(_INTEGERS[few.element_size()]).to(device, torch.int64)
        bits, keys = (bits ^ (bits >> 32)) & _WORD, _keys(name, tuple(tensors[name].shape))
        total = total + _hash_(bits ^ _hash_(torch.arange(len(bits), device=device), keys), keys).sum()
    return total


def _matrices(shape: Sequence[int]) -> tuple[int, list[int]]:
    """Return how many matrices a weight with three dimensions is, 0 for any other, which is one; and their sides."""
    return (shape[0], [*shape[1:]]) if len(shape) == 3 else (0, [shape[0], prod(shape[1:])])


class Projection:
    """A projection of the gradients of some parameters.

    In the factored kind a weight is one matrix, or a stack, each multiplied by its own two factors, and their sum.

    Args:
        size: how many numbers a gradient becomes; for "factored" the two sides of what a weight becomes.
        kind: "sparse" or "factored".
        seed: which of the projections.
        shapes: the shape of each parameter, by its plain name.
    """

    def __init__(self, size: int, kind: str, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if kind not in ("sparse", "factored"):
            raise ArgumentError(f"project: `kind` is 'sparse' or 'factored'; found {kind!r:.80}.")
        self.size, self.kind, self.seed = count(size, "size"), kind, count(seed, "seed", 0)
        self.shapes = {name: shapes[name] for name in sorted(shapes)}
        weights = [name for name, shape in self.shapes.items() if kind == "factored" and len(shape) > 1]
        self._made: dict[str, list[int]] = {}  # what the two sides of each weight become
        for name in weights:
            stack, sides = _matrices(self.shapes[name])
            self._made[name] = [size if stack else min(side, size) for side in sides]
        # All other parameters are sketched together, into as many numbers as a weight gets.
        self._buckets = size if kind == "sparse" else size * size * (len(weights) < len(shapes))
        *starts, self._sketched = itertools.accumulate(map(prod, self._made.values()), initial=0)
        self._starts, self.columns = dict(zip(weights, starts, strict=True)), self._sketched + self._buckets
        numbers = sum(prod(shape) for shape in shapes.values())
        if self.columns > numbers:
            raise ArgumentError(
                f"project: `size` {size} gives {self.columns:,} numbers for a gradient of {numbers:,}. Pass a smaller "
                "size, or use grads(), which has all of them."
            )

    def apply(self, by_name: Mapping[str, SampleGrads], scales: Mapping[str, Tensor], out: Tensor, budget: int) -> None:
        """Add projected gradients, by plain name, times scales if there are any, to `out`, (samples, columns)."""
        for name, grads in by_name.items():
            scale = scales.get(name)
            if not len(out) or not prod(self.shapes[name]):
                continue
            if name not in self._made:
                out[:, self._sketched :] += self._sketch(grads, name, scale, budget, out.device).to(out)
                continue
            factors = self._signs(name, 0, out.device), self._signs(name, 1, out.device)
            projected = _factored(grads, self.shapes[name], factors, scale).flatten(1).to(out)
            for factor in factors:
                projected = projected if factor is None else projected * factor.shape[2] ** -0.5
            start = self._starts[name]
            out[:, start : start + projected.shape[1]] += projected

    def describe(self) -> dict[str, Any]:
        """Return what the projection depends on."""
        named = {name: list(shape) for name, shape in self.shapes.items()}
        return {"kind": self.kind, "seed": self.seed, "size": self.size, "columns": self.columns, "parameters": named}

    def _signs(self, name: str, which: int, device: torch.device) -> Tensor | None:
        """Return the factors of the left or the right side of a weight, made of signs; None if it stays as it is."""
        stack, sides = _matrices(self.shapes[name])
        side, columns, many = sides[which], self._made[name][which], max(1, stack)
        if not stack and side == columns:
            return None
        keys = _keys("factored", self.seed, name, stack, *sides, ("left", "right")[which])
        words = _hash_(torch.arange(many * side * -(-columns // 32), device=device), keys).view(many, side, -1, 1)
        bits = (words >> torch.arange(min(columns, 32), device=device)) & 1
        return (bits.flatten(2)[..., :columns] * 2 - 1).float()

    def _sketch(self, grads: SampleGrads, name: str, scale: Tensor | None, budget: int, device: torch.device) -> Tensor:
        """Return the sums of the numbers in each bucket, with their signs: (samples, buckets)."""
        if isinstance(grads, Sum):
            return torch.stack([self._sketch(use, name, scale, budget, device).double() for use in grads.uses]).sum(0)
        if isinstance(grads, Rows):
            return self._sketch_rows(grads, name, scale)
        numbers, most = prod(self.shapes[name]), max(budget // 2, 2 * CHUNK_BYTES)
        # The buckets of all numbers, for all samples; or those of some, for as many samples as memory holds.
        whole = self._bucketed_(torch.arange(numbers, device=device), name) if 8 * numbers <= most else None
        step, out = max(1, (CHUNK_BYTES if whole is not None else most) // (4 * numbers)), []
        for first in range(0, grads.samples, step):
            rows = as_rows(_scaled(grads.dense(slice(first, min(first + step, grads.samples))), scale))
            sums = rows.new_zeros(len(rows), 2 * self._buckets)
            for start in range(0, numbers, _BLOCK):
                cells = slice(start, min(numbers, start + _BLOCK))
                some = None if whole is not None else torch.arange(cells.start, cells.stop, device=device)
                places = self._bucketed_(some, name) if some is not None else whole[cells]  # type: ignore[index]
                sums.index_add_(1, places.to(rows.device), rows[:, cells])
            out.append(_signed(sums))
        return torch.cat(out)

    def _sketch_rows(self, grads: Rows, name: str, scale: Tensor | None) -> Tensor:
        """Make the buckets of those numbers alone that occur."""
        width, out = grads.table[1], []
        for part in in_chunks(grads.samples, 4 * grads.values[:1].numel()):
            ids, values = grads.ids[part], grads.values[part]
            if scale is not None:
                values = values * scale.to(values).reshape(grads.table)[ids]
            used, place = torch.unique(ids, return_inverse=True)
            cells = (used[:, None] * width + torch.arange(width, device=ids.device)).view(-1)
            places = self._bucketed_(cells, name).view(-1, width)[place]
            sums = values.new_zeros(len(ids), 2 * self._buckets)
            out.append(_signed(sums.scatter_add_(1, places.flatten(1), values.flatten(1))))
        return torch.cat(out)

    def _bucketed_(self, cells: Tensor, name: str) -> Tensor:
        """Replace the place of each number by twice its bucket, and one more if its sign is to change."""
        words = _hash_(cells, _keys("sparse", self.seed, name, self.shapes[name]))
        signs = words & 1
        return words.mul_(self._buckets).bitwise_right_shift_(32).mul_(2).add_(signs)


def _signed(sums: Tensor) -> Tensor:
    both = sums.view(len(sums), -1, 2)
    return both[..., 0] - both[..., 1]


def _scaled(block: Tensor, scale: Tensor | None) -> Tensor:
    return block if scale is None else block * scale.to(block)


def _factored(grads: SampleGrads, shape: Sequence[int], factors: _Factors, scale: Tensor | None) -> Tensor:
    """Return left' G right for the gradient G of each sample, from its factors where it is held so."""
    (left, right), (stack, sides) = factors, _matrices(shape)
    if scale is None:
        if isinstance(grads, Sum):
            return torch.stack([_factored(use, shape, factors, None).double() for use in grads.uses]).sum(0)
        if isinstance(grads, Outer) and not stack:
            return _from_outer(grads.left, grads.right, factors)
        if isinstance(grads, Rows) and grads.table == grads.shape and left is not None:
            parts = in_chunks(grads.samples, 2 * grads.values[:1].numel())
            return torch.cat([_product(left[0][grads.ids[i]], grads.values[i], (None, right)) for i in parts])
        if isinstance(grads, Members) and left is not None and right is not None:
            return _from_members(grads, left, right)
        if isinstance(grads, Convolved) and left is not None and not stack and _mixes_channels(grads):
            g = torch.tensordot(grads.g, left[0].to(grads.g), ([2], [0])).movedim(-1, 2)
            sides[0] = g.shape[2]
            grads, left = Convolved(g, grads.x, grads.options, (sides[0], *grads.shape[1:])), None
    blocks = []
    for part in grads.chunks():
        rows = as_rows(_scaled(grads.dense(part), scale))
        whole = rows.view(len(rows), max(1, stack), *sides)
        whole = whole if left is None else left.transpose(1, 2).to(whole) @ whole
        blocks.append((whole if right is None else whole @ right.to(whole)).sum(1))
    return torch.cat(blocks)


def _mixes_channels(grads: Convolved) -> bool:
    *_, transposed, _, groups = grads.options
    return groups == 1 and not transposed


def _from_outer(left: Tensor, right: Tensor, factors: _Factors) -> Tensor:
    parts = in_chunks(len(left), left[:1].numel() + right[:1].numel())
    return torch.cat([_product(upcast_half(left[part]), upcast_half(right[part]), factors) for part in parts])


def _product(left: Tensor, right: Tensor, factors: _Factors) -> Tensor:
    """Return the sums over rows of outer products, both sides projected."""
    left, right = (x if f is None else x @ f[0].to(x) for x, f in zip((left, right), factors, strict=True))
    return torch.bmm(left.transpose(1, 2).to(right), right)


def _from_members(grads: Members, left: Tensor, right: Tensor) -> Tensor:
    made = left.shape[-1], right.shape[-1]
    out = torch.zeros(grads.samples, prod(made), dtype=torch.float64, device=grads.left.device)
    order = torch.argsort(grads.member, stable=True)
    for e, rows in enumerate(torch.split(order, torch.bincount(grads.member, minlength=grads.shape[0]).tolist())):
        for few in torch.split(rows, max(1, CHUNK_BYTES // (8 * prod(made)))):
            a, b = grads.left[few] @ left[e].to(grads.left), grads.right[few] @ right[e].to(grads.right)
            out.index_add_(0, grads.owner[few], (a[:, :, None] * b[:, None, :]).flatten(1).double())
    return out.view(-1, *made)


def cross_products(a: SampleGrads, b: SampleGrads) -> Tensor:
    """Return the inner products of all pairs, in float64."""
    if isinstance(a, Rows | Sum):  # writing these down may take much memory: one at a time, as a direction
        return torch.stack([along(a, b.dense(slice(i, i + 1))[0]) for i in range(b.samples)], 1)
    if isinstance(b, Rows | Sum):
        return cross_products(b, a).T
    blocks = []
    for part in a.chunks():
        left = as_rows(a.dense(part))
        blocks.append(torch.cat([inner_products(left, as_rows(b.dense(some)).to(left)) for some in b.chunks()], 1))
    return torch.cat(blocks)


def along(grads: SampleGrads, direction: Tensor) -> Tensor:
    """Return the inner products in float64; a direction of any size is brought to a size that can be multiplied."""
    exact = double(direction)
    size = row_norms(exact[None])[0]
    size = size.where((size > 0) & (size < torch.inf), 1)
    return grads.dot(exact / size) * size
