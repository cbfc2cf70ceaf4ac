"""Per-sample gradients of parameters that are DTensors: of the shard here, by the same rules as of plain tensors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._distributed.collectives import all_reduce_
from .._torch.dtensor import (
    any_dtensor,
    is_crossing,
    is_dtensor,
    shard_ranges,
    sharded_dims,
    spec_of,
    spread,
    stored_shard,
)
from .._torch.signature import Scan
from ..errors import UnsupportedOperationError
from . import engine, ops
from ._tensor_needs import Need, Use, need_of
from ._tensor_versions import counting_shard
from .layout.owners import Owners
from .layout.samples import SampleLayout
from .ops.context import RuleContext
from .ops.registry import apply_rule
from .owners.cuts import UseSite
from .representations.base import Dense, SampleGrads

_WHAT = "per-sample gradients"
_UNCHANGED = frozenset({"ToCopyBackward0", "CloneBackward0", "AliasBackward0"})


def spread_uses(cuts: Iterable[UseSite], scan: Scan) -> set[tuple[Node, int]]:
    """Return the uses, by op and position, of parameters that are DTensors or are used as such."""
    if not any(map(is_crossing, scan.custom)) and not any_dtensor(scan.leaves.values()):
        return set()
    return {(cut.node, cut.position) for cut in cuts if _is_spread(cut)}


def _is_spread(cut: UseSite) -> bool:
    below = list(graph.walk([cut.value]))
    leaves = [graph.leaf_tensor(node) for node in below if graph.is_leaf(node)]
    return any(map(is_dtensor, leaves)) or any(map(is_crossing, below))


def shard_form(cut: UseSite, ctx: RuleContext, owners: tuple[Owners, ...], leaf: Node, name: str) -> SampleGrads:
    """Return per-sample gradients of this rank's shard of a parameter, of one use of it.

    Every rank of the mesh has to ask.

    Args:
        cut: the use.
        ctx: the same, for a rule.
        owners: owners of the outputs of the op.
        leaf: the parameter.
        name: its name, for errors.
    """
    parameter: Any = graph.leaf_tensor(leaf)
    _check(cut, ctx, parameter, name)
    shard = stored_shard(parameter)
    if not any(is_dtensor(g) for g in ctx.gradients):
        return _from_plain(cut, ctx, parameter)
    if all(g is None for g in ctx.gradients):
        return Dense(torch.zeros((), device=shard.device).expand(ctx.samples, *shard.shape))
    swaps = _swaps(cut.value, leaf)
    form = None if swaps is None else _by_rule(ctx, owners, parameter, swaps)
    form = _one_by_one(cut, ctx, owners, parameter) if form is None else form
    assert form.shape == tuple(shard.shape), (form.shape, shard.shape)
    return form


def shard_gradient(gradient: Any, leaf: Any) -> Tensor:
    """Return this rank's shard of a gradient, laid out as its parameter; plain ones as they are."""
    if not is_dtensor(leaf):
        return stored_shard(gradient)
    spec = spec_of(leaf)
    with torch.no_grad():
        found: Tensor = stored_shard(gradient.redistribute(spec.mesh, spec.placements))
    return found


def shard_of(whole: Tensor, leaf: Any) -> Tensor:
    """Return this rank's shard of a plain tensor that all ranks have, cut as a parameter is."""
    if not is_dtensor(leaf):
        return whole
    spec = spec_of(leaf)
    return _Cut(spec.mesh, sharded_dims(spec.placements) or ()).shard(whole)


def _check(cut: UseSite, ctx: RuleContext, parameter: Any, name: str) -> None:
    found = [g for g in ctx.gradients if is_dtensor(g)]
    if not is_dtensor(parameter):
        raise _refusal(
            name, f"is a plain tensor that `{cut.op}` uses as a DTensor", "Make it one: distribute_tensor()."
        )
    if any(spec_of(g).mesh != spec_of(parameter).mesh for g in found):
        raise _refusal(name, f"and what `{cut.op}` makes of it lie on different meshes", "Bring them to one.")


def _refusal(name: str, what: str, advice: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: the model is tensor parallel, and `{name}` {what}, so it is not known which part of its gradient "
        f"is on which rank. {advice}",
        "",
        name,
    )


def _swaps(value: GradientEdge, leaf: Node) -> list[tuple[int, int]] | None:
    """Return which dimensions are swapped on the way from a value to its parameter; None if more is done to it."""
    found: list[tuple[int, int]] = []
    node: Node | None = value.node
    while node is not leaf:
        assert node is not None
        rank, op = len(graph.describe(node)[0].shape), node.name()
        if op == "TransposeBackward0":
            first, second = (engine.saved_number(node, name) % rank - rank for name in ("dim0", "dim1"))
            found.append((first, second))
        elif op == "TBackward0" and rank == 2:
            found.append((-2, -1))
        elif op not in _UNCHANGED and not (is_crossing(node) and graph.op(node) == "RedistributeBackward"):
            return None
        node = node.next_functions[0][0]
    return found


@dataclass(frozen=True)
class _Cut:
    """How a parameter is cut over a mesh: for each dimension of it the one of the tensor, None for none."""

    mesh: Any
    dims: tuple[int | None, ...]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return tuple(size for _, size in shard_ranges(whole, self.mesh, self.dims))

    def shard(self, tensor: Any) -> Tensor:
        """Return this rank's shard of a tensor that lies in any way; of a plain one, which all ranks have, too."""
        if is_dtensor(tensor):
            return counting_shard(tensor, tensor.redistribute(self.mesh, _placements(self.dims)))
        for dim, (start, size) in enumerate(shard_ranges(tensor.shape, self.mesh, self.dims)):
            tensor = tensor.narrow(dim, start, size)
        found: Tensor = tensor
        return found

    def owners(self, whole: Owners) -> Owners:
        for dim, (start, size) in enumerate(shard_ranges(whole.shape, self.mesh, self.dims)):
            whole = whole.part(dim, start, size)
        return whole


def _placements(dims: Sequence[int | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim) for dim in dims]


class _ShardContext(RuleContext):
    """A use as a rule sees it that is to compute the gradient of a shard."""

    read: Callable[[str], Any]

    def saved(self, name: str) -> Any:
        return self.read(name)


def _by_rule(
    ctx: RuleContext, owners: tuple[Owners, ...], parameter: Any, swaps: list[tuple[int, int]]
) -> SampleGrads | None:
    """Apply the rule of an op to shards; None where it is not known which shards it needs."""
    spec, rank = spec_of(parameter), len(ctx.shape)
    dims = sharded_dims(spec.placements)
    if dims is None or ctx.gradients[0] is None:
        return None
    dims = tuple([_swapped(dim, swaps, rank) for dim in dims])
    gradient: Any = ctx.gradients[0]
    now = sharded_dims(gradient.placements) or (None,) * len(dims)
    use = Use(ctx.position, ctx.shape, gradient, ctx.saved)
    needs = [need_of(ctx.op, use, dim, n) for dim, n in zip(dims, now, strict=True)]
    if any(need is None for need in needs):
        return None
    form = _applied(ctx, owners, _Cut(spec.mesh, dims), [need for need in needs if need is not None])
    for swap in swaps:
        form = form if form is None else form.swapped(swap)
    return form


def _swapped(dim: int | None, swaps: Sequence[tuple[int, int]], rank: int) -> int | None:
    """Return where a dimension of a parameter is in a value of the given rank that is made from it."""
    for swap in reversed(swaps):
        first, second = (d % rank for d in swap)
        dim = {first: second, second: first}.get(dim, dim) if dim is not None else None
    return dim


def _applied(ctx: RuleContext, owners: tuple[Owners, ...], value: _Cut, needs: Sequence[Need]) -> SampleGrads | None:
    mesh, shape = value.mesh, value.shape(ctx.shape)
    of_gradient = _Cut(mesh, tuple([need.gradient for need in needs]))
    gradient = of_gradient.shard(ctx.gradients[0])
    layout = of_gradient.owners(owners[0]).layout(ctx.samples)
    saved: dict[str, Any] = {}

    def read(name: str) -> Any:
        if name not in saved:
            found = ctx.saved(name)
            cut = _Cut(mesh, tuple([need.saved.get(name) for need in needs]))
            saved[name] = cut.shard(found) if isinstance(found, Tensor) else found
        return saved[name]

    if ctx.op == "EmbeddingBackward0":
        gradient = _only_rows_here(ctx, value, gradient, read, saved)
    form = _rule(ctx, shape, gradient, layout, read)
    if form is None or not any(need.is_partial for need in needs):
        return form
    return _added_up(form, [mesh.get_group(i) for i, need in enumerate(needs) if need.is_partial])


def _rule(
    ctx: RuleContext, shape: tuple[int, ...], gradient: Tensor, layout: SampleLayout, read: Callable[[str], Any]
) -> SampleGrads | None:
    rest = len(ctx.gradients) - 1
    empty = (SampleLayout.empty(ctx.samples),) * rest
    local = _ShardContext(
        ctx.op,
        ctx.node,
        ctx.position,
        shape,
        (gradient, *(None,) * rest),
        (layout, *empty),
        ctx.samples,
        ctx.allow_coupling,
    )
    local.read = read
    if not gradient.numel():
        return Dense(gradient.new_zeros(ctx.samples, *shape))
    return apply_rule(local)


def _only_rows_here(
    ctx: RuleContext, table: _Cut, gradient: Tensor, read: Callable[[str], Any], saved: dict[str, Any]
) -> Tensor:
    """Return the gradient of those look-ups that found a row of this rank's shard, and number the rows from there."""
    start, count = shard_ranges(ctx.shape, table.mesh, table.dims)[0]
    ids, padding = read("indices"), engine.saved_number(ctx.node, "padding_idx")
    saved["padding_idx"] = padding - start if start <= padding < start + count else -1
    if (start, count) == (0, ctx.shape[0]):
        return gradient
    here = (ids >= start) & (ids < start + count)
    saved["indices"] = torch.where(here, ids - start, 0)
    return gradient.where(here[..., None], 0)


def _added_up(form: SampleGrads, groups: Sequence[Any]) -> SampleGrads | None:
    values = form.stored
    if values is None:
        return None
    total = values.contiguous().clone()
    for group in groups:
        all_reduce_(total, group, _WHAT)
    return Dense(total)


def _one_by_one(cut: UseSite, ctx: RuleContext, owners: tuple[Owners, ...], parameter: Any) -> SampleGrads:
    """Run the op, and what lies between it and the parameter, once per sample: right for every op and layout."""
    rows = [_alone(cut, ctx, owners, parameter, sample) for sample in range(ctx.samples)]
    return Dense(torch.stack(rows))


def _from_plain(cut: UseSite, ctx: RuleContext, parameter: Any) -> SampleGrads:
    """Return the gradients of a parameter whose value was made plain before it met the data, a table of positions."""
    form, dtype = ops.apply(ctx), graph.describe(cut.value.node)[cut.value.output_nr].dtype
    rows = []
    for sample in range(ctx.samples):
        given = form.dense(slice(sample, sample + 1))[0].to(dtype)
        rows.append(_pulled(cut, given, parameter))
    return Dense(torch.stack(rows))


def _pulled(cut: UseSite, gradient: Tensor, parameter: Any) -> Tensor:
    """Carry a gradient from a value down to its parameter."""
    found: Any
    with engine.explain_errors(f"what `{cut.op}` uses"):
        (found,) = torch.autograd.grad([cut.value], [parameter], [gradient], retain_graph=True, allow_unused=True)
    return torch.zeros_like(stored_shard(parameter).detach()) if found is None else shard_gradient(found, parameter)


def _alone(cut: UseSite, ctx: RuleContext, owners: tuple[Owners, ...], parameter: Any, sample: int) -> Tensor:
    given = [None if g is None else _part_of(sample, g, own) for g, own in zip(ctx.gradients, owners, strict=True)]
    with torch.no_grad():
        answer: Any = engine.call(ctx.node, given)[ctx.position]
    if answer is None:
        return torch.zeros_like(stored_shard(parameter).detach())
    with torch.no_grad():
        answer = answer.sum_to_size(ctx.shape)
    return _pulled(cut, answer, parameter)


def _part_of(sample: int, gradient: Any, owners: Owners) -> Tensor:
    """Return a gradient with zeros at the elements that the sample does not own; it may be partial sums."""
    spec = spec_of(gradient)
    dims = sharded_dims(spec.placements)
    if dims is None:
        gradient = gradient.redistribute(spec.mesh, _placements([None] * spec.mesh.ndim))
        spec = spec_of(gradient)
        dims = (None,) * spec.mesh.ndim
    shard = stored_shard(gradient)
    owned = (_Cut(spec.mesh, dims).owners(owners).ids == sample).to(shard.device)
    return spread(shard.where(owned, 0), spec)


def batched(block: Tensor, leaf: Any) -> Tensor:
    """Return gradients of some samples, (samples, *shard), laid out as the parameter they are of."""
    if not is_dtensor(leaf):
        return block
    from torch.distributed.tensor import DTensor

    spec = spec_of(leaf)
    dims = sharded_dims(spec.placements) or ()
    shape = torch.Size((len(block), *leaf.shape))
    stride = torch.empty(shape, device="meta").stride()
    places = _placements([None if dim is None else dim + 1 for dim in dims])
    found: Tensor = DTensor.from_local(
        block.contiguous(), spec.mesh, places, run_check=False, shape=shape, stride=stride
    )
    return found
