"""Inline reentrant checkpoints, so that one graph shows everything.

Such a checkpoint records one node for a whole region, and no graph of what is inside. Here each region is
computed again, as its own backward would, on its inputs with all their history. A new root then stands above
the old one and above the outputs of every region, and hands each of them its gradient:

      new root ------------------+
          |                      |
        losses          outputs of the region
          |                      |
     ops above it          ops inside it
          |                      |
     [checkpoint]  passed by     |
          |                      |
          +--- ops below it -----+

That is one graph like any other, and nobody else needs to know.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch import checkpoint
from ..errors import UnsupportedOperationError
from . import ops
from .engine import Losses, explain_errors
from .ops.fallback import one_by_one
from .owners.cuts import UseSite

_ADVICE = (
    "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint: it is the kind torch recommends, and this works "
    "with it."
)


@dataclass(frozen=True, eq=False)
class _Region:
    """A region computed again.

    Attributes:
        node: what the checkpoint recorded in its place.
        outputs: what came out; None for what needs no gradient.
        input_edges: the edge at which the gradient of each argument leaves; None for what needs no gradient.
        inside: the regions within this one.
    """

    node: Node
    outputs: tuple[Tensor | None, ...]
    input_edges: tuple[GradientEdge | None, ...]
    inside: tuple["_Region", ...]


def inline_checkpoints(losses: Losses) -> Losses:
    """Return the losses with the inside of every reentrant checkpoint in their graph."""
    regions = _regions(losses.scan.custom, set(losses.scan.nodes)) if losses.scan.custom else ()
    if not regions:
        return losses
    everything = tuple(_flat(regions))
    outputs = [out for region in everything for out in region.outputs if out is not None]
    with torch.enable_grad():
        root = ReentrantCheckpoint.apply(regions, everything, losses.root, *outputs)  # type: ignore[no-untyped-call]
    return replace(losses, root=root)


def refuse_hidden_weights(cuts: Iterable[UseSite]) -> None:
    """Refuse a shared value that was partly made inside a region: no gradient can go down through it."""
    for cut in cuts:
        for node in graph.walk([cut.value]):
            if checkpoint.is_reentrant_checkpoint(node):
                raise _refusal(
                    node,
                    f"`{graph.op(cut.node)}` uses a value that samples share, and that was partly made inside a "
                    "reentrant checkpoint.",
                )


class ReentrantCheckpoint(torch.autograd.Function):
    """The new root. Its backward asks for the gradient at the outputs of every region."""

    @staticmethod
    def forward(
        ctx: Any, regions: tuple[_Region, ...], everything: tuple[_Region, ...], root: Tensor, *_outputs: Tensor
    ) -> Tensor:
        ctx.regions, ctx.everything, ctx.root = regions, everything, root
        ctx.bypassed = tuple(region.node for region in everything)
        ctx.regions_inside = tuple((region.node, region.outputs) for region in everything)
        return root.clone()

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> Any:
        found: dict[_Region, tuple[Tensor | None, ...]] = {}
        with ExitStack() as stack:
            for region in ctx.everything:
                stack.enter_context(checkpoint.override_backward(region.node, partial(_through, region, found)))
            _ask([(ctx.root, weights)], _starts(ctx.regions))
        below = [
            found[region][i] if region in found else None
            for region in ctx.everything
            for i, out in enumerate(region.outputs)
            if out is not None
        ]
        return None, None, weights, *below


ops.registry.add_rule(ReentrantCheckpoint, one_by_one)


def _through(
    region: _Region, found: dict[_Region, tuple[Tensor | None, ...]], *gradients: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Carry the gradient from the outputs of a region to its inputs, and note what it was at the outputs."""
    found[region] = gradients
    pairs = [(out, g) for out, g in zip(region.outputs, gradients, strict=True) if out is not None and g is not None]
    input_edges = [input_edge for input_edge in region.input_edges if input_edge is not None]
    answers = iter(_ask(pairs, [*input_edges, *_starts(region.inside)]))
    return (None, None, *(None if input_edge is None else next(answers) for input_edge in region.input_edges))


def _ask(pairs: Sequence[tuple[Tensor, Tensor]], edges: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
    if not pairs or not edges:
        return (None,) * len(edges)
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, edges, gradients, retain_graph=True, allow_unused=True)


def _starts(regions: Iterable[_Region]) -> list[GradientEdge]:
    """Return for each region an edge below it: to get there, the engine must run the checkpoint."""
    below = [[GradientEdge(node, nr) for node, nr in region.node.next_functions if node] for region in regions]
    return [edges[0] for edges in below]


def _regions(nodes: Iterable[Node], known: set[Node]) -> tuple[_Region, ...]:
    custom = [node for node in nodes if graph.is_custom(node)]
    for node in custom:
        if checkpoint.is_foreign_checkpoint(node):
            raise _refusal(node, f"`{graph.op(node)}` is a checkpoint other than torch's, and hides its parameters.")
    return tuple(_computed_again(node, known) for node in custom if checkpoint.is_reentrant_checkpoint(node))


def _computed_again(node: Node, known: set[Node]) -> _Region:
    """Run a region again, and read what it recorded up to its inputs."""
    with explain_errors("what a reentrant checkpoint saved"):
        inputs, outputs = checkpoint.run_checkpoint(node)
    input_edges = tuple(None if x is None else graph.edge_of(x) for x in inputs)
    nodes = _down_to(outputs, {input_edge.node for input_edge in input_edges if input_edge is not None})
    if any(n in known and not graph.is_leaf(n) for n in nodes):
        raise _refusal(
            node,
            "a reentrant checkpoint uses a tensor that was computed outside of it and not passed to it, such as "
            "one in a closure.",
        )
    known.update(nodes)
    return _Region(node, outputs, input_edges, _regions(nodes, known))


def _down_to(outputs: Iterable[Tensor | None], input_edges: set[Node]) -> list[Node]:
    """Return the nodes above the input edges, in an order that depends on the structure alone."""
    stack = [graph.edge_of(out).node for out in outputs if out is not None]
    seen: dict[Node, None] = {}
    while stack:
        top = stack.pop()
        if top not in seen and top not in input_edges:
            seen[top] = None
            stack += [used for used, _ in top.next_functions if used is not None]
    return list(seen)


def _flat(regions: Iterable[_Region]) -> Iterator[_Region]:
    for region in regions:
        yield region
        yield from _flat(region.inside)


def _refusal(node: Node, what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"per_sample: {what} {_ADVICE}", graph.op(node))
