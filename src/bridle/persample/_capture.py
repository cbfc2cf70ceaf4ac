"""From losses to pieces: read the graph, find the cuts, ask the engine once, apply the rules."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from ..errors import UnsupportedOperationError
from . import _reentrant, _torch, rules
from ._cuts import Cut, Losses, find_cuts, leaves_below, refuse_coupling
from ._lower import lower, nothing
from ._merge import merged
from ._owners import Layout
from ._pieces import Dense, Piece
from ._reuse import form_of, may_reuse
from ._use import Use


@dataclass(frozen=True)
class Options:
    """What the user allows.

    Attributes:
        coupling: losses that depend on other samples.
        opaque: ops nobody can look into, taken one sample at a time.
    """

    coupling: bool
    opaque: bool


@dataclass(frozen=True, eq=False)
class Captured:
    """Per-sample gradients in their cheapest forms.

    Attributes:
        pieces: one for each parameter that the losses depend on.
        reused: whether the owners were known from an earlier graph of the same form.
        eps: rounding of the coarsest dtype that gradients were computed in.
        losses: what was differentiated, with nothing hidden.
    """

    pieces: dict[str, Piece]
    reused: bool
    eps: float
    losses: Losses


# Owners by form of graph, for graphs whose owners cannot change: (cuts, layouts) by the nodes' numbers.
_KNOWN: OrderedDict[Any, tuple[list[tuple[int, int, int, int]], dict[int, tuple[Layout, ...]]]] = OrderedDict()
_KNOWN_AT_MOST = 64


def capture(losses: Losses, parameters: dict[str, Tensor], buffers: frozenset[int], options: Options) -> Captured:
    """Return per-sample gradients of every parameter that the losses depend on."""
    losses = _reentrant.opened(losses)
    read = losses.read
    names = {id(tensor): name for name, tensor in parameters.items()}
    leaves = {
        node: names[id(tensor)]
        for node in read.nodes
        if graph.is_leaf(node) and id(tensor := graph.leaf_tensor(node)) in names
    }
    if losses.samples <= 1:
        used = set(leaves.values())
        return Captured(_few_samples(losses, {n: p for n, p in parameters.items() if n in used}), False, 0.0, losses)
    cuts, layouts, reused = _cuts(read, leaves, losses, options)
    _reentrant.refuse_hidden_weights(cuts, losses)
    if not reused and not options.coupling:
        refuse_coupling(cuts, losses.root.numel(), buffers, graph.find_names(parameters))
    if not options.opaque:
        _refuse_opaque(cuts, leaves)
    uses = _uses(cuts, layouts, losses, options)
    # Saved values behind a checkpoint are computed again once inside the engine, and once each outside.
    packed = any(_torch.is_packed(cut.node) for cut in cuts)
    applied = _torch.inside_engine(lambda: _apply(uses)) if packed else _apply(uses)
    pieces: dict[str, list[Piece]] = {}
    for cut, piece in zip(cuts, applied, strict=True):
        for leaf in leaves_below(cut.value.node):
            if leaf in leaves:
                pieces.setdefault(leaves[leaf], []).append(lower(piece, cut.value, leaf))
    order = [name for name in parameters if name in pieces]
    dtypes = {g.dtype for use in uses for g in use.gradients if g is not None}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return Captured({name: merged(pieces[name]) for name in order}, reused, eps, losses)


def _apply(uses: list[Use]) -> list[Piece]:
    with torch.no_grad():
        return [rules.apply(use) for use in uses]


def _cuts(
    read: graph.Graph, leaves: dict[Node, str], losses: Losses, options: Options
) -> tuple[list[Cut], dict[Node, tuple[Layout, ...]], bool]:
    wanted = tuple(i for i, node in enumerate(read.nodes) if node in leaves)
    form = (form_of(read, losses), wanted, options)
    if form in _KNOWN:
        _KNOWN.move_to_end(form)
        places, known = _KNOWN[form]
        nodes = read.nodes
        cuts = [Cut(nodes[n], p, GradientEdge(nodes[v], nr)) for n, p, v, nr in places]
        return cuts, {nodes[n]: layouts for n, layouts in known.items()}, True
    cuts, layouts = find_cuts(read, leaves, losses)
    if may_reuse(read, cuts, layouts, losses):
        number = {node: i for i, node in enumerate(read.nodes)}
        _KNOWN[form] = (
            [(number[c.node], c.position, number[c.value.node], c.value.output_nr) for c in cuts],
            {number[node]: found for node, found in layouts.items()},
        )
        if len(_KNOWN) > _KNOWN_AT_MOST:
            _KNOWN.popitem(last=False)
    return cuts, layouts, False


def _uses(cuts: list[Cut], layouts: dict[Node, tuple[Layout, ...]], losses: Losses, options: Options) -> list[Use]:
    edges = [GradientEdge(node, i) for node in layouts for i in range(len(layouts[node]))]
    found = iter(_torch.gradients_at(losses.root, torch.ones_like(losses.root), edges))
    gradients = {node: tuple(next(found) for _ in layouts[node]) for node in layouts}
    cache: dict[tuple[Node, str], Any] = {}
    return [
        Use(
            cut.node,
            cut.position,
            _shape(cut.value),
            gradients[cut.node],
            layouts[cut.node],
            losses.samples,
            options.coupling,
            cache,
        )
        for cut in cuts
    ]


def _shape(value: GradientEdge) -> tuple[int, ...]:
    if graph.is_leaf(value.node):
        return tuple(graph.leaf_tensor(value.node).shape)
    return graph.describe(value.node)[value.output_nr].shape


def _few_samples(losses: Losses, leaves: dict[str, Tensor]) -> dict[str, Piece]:
    if losses.samples == 0:
        return {name: nothing(0, leaf) for name, leaf in leaves.items()}
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    found = _torch.gradients_at(losses.root, torch.ones_like(losses.root), edges)
    dense = {name: g.to_dense() if g.is_sparse else g for name, g in zip(leaves, found, strict=True) if g is not None}
    return {name: Dense(g[None]) for name, g in dense.items()}


def _refuse_opaque(cuts: list[Cut], leaves: dict[Node, str]) -> None:
    for cut in cuts:
        if graph.is_custom(cut.node) and not rules.has_rule(graph.op(cut.node)):
            below = [leaves[leaf] for leaf in leaves_below(cut.value.node) if leaf in leaves]
            raise UnsupportedOperationError(
                f"per_sample: `{', '.join(below)}` is used by `{graph.op(cut.node)}`, a custom Function (or "
                "a compiled region) that cannot be looked into. Give it a rule with bridle.register_rule, or "
                "pass allow_opaque=True to run its backward once per sample, which is right if that "
                "backward is linear in the gradient it gets, as every backward should be.",
                graph.op(cut.node),
                below[0] if below else "",
            )
