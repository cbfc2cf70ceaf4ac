"""Runs of torch's engine over parts of a graph."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import hooks
from ..._torch.engine import run_engine
from ..._torch.nodes import output_counts
from ..._torch.saved import unpacked
from ...errors import UnsupportedOperationError
from .errors import explain_errors, raise_explained

T = TypeVar("T")


def call(node: Node, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run one node of the graph by itself and return what it hands to each of its ``next_functions``."""
    run: Any = node
    if graph.is_custom(node):
        # The engine hands zeros to a Function for outputs without a gradient, unless it was told not to.
        run, outs = node.apply, graph.describe(node)  # type: ignore[attr-defined]
        gradients = [_zeros(out) if g is None else g for g, out in zip(gradients, outs, strict=True)]
    with explain_errors(f"`{graph.op(node)}`"):
        answer = run(*gradients)
    answer = answer if isinstance(answer, tuple) else (answer,)
    if not graph.is_custom(node):
        return answer
    # A custom Function answers for all its arguments, also for those that are no tensors and have no edge.
    needed = zip(answer, node.needs_input_grad, strict=False)  # type: ignore[attr-defined]
    wanted = iter([g for g, is_needed in needed if is_needed])
    return tuple(None if used is None else next(wanted) for used, _ in node.next_functions)


def _zeros(out: graph.OutputInfo) -> Tensor:
    return torch.zeros(out.shape, dtype=out.dtype, device=out.device)


def visit(
    root: Tensor,
    weights: Tensor | None,
    passed: Iterable[Node],
    ends: Iterable[Node],
    see: Callable[[Node, tuple[Tensor | None, ...]], None],
    *,
    retain_graph: bool,
) -> None:
    """Differentiate ``(root * weights).sum()`` and show the gradients at the outputs of these ops.

    Each is shown when the engine comes by, so that nothing is kept which `see` does not keep.

    Args:
        root: one loss per entry.
        weights: one weight per loss; all count alike without them.
        passed: ops that the engine runs on its way to the ends.
        ends: ops below which it does not go; they are not run.
        see: called once for each op that gets a gradient, before the engine runs it.
        retain_graph: whether ops keep what they saved when they have run.
    """
    ends = list(ends)
    outputs = output_counts(ends)
    edges = [GradientEdge(node, i) for node, count in zip(ends, outputs, strict=True) for i in range(count)]
    if not edges:
        return
    handles = hooks.register_prehooks(passed, lambda node: partial(see, node))
    try:
        found = iter(gradients_at(root, weights, edges, retain_graph=retain_graph))
    finally:
        for handle in handles:
            handle.remove()
    for node, count in zip(ends, outputs, strict=True):
        see(node, tuple(islice(found, count)))


def gradients_at(
    root: Tensor, weights: Tensor | None, edges: Sequence[GradientEdge], *, retain_graph: bool = True
) -> tuple[Tensor | None, ...]:
    """Return the gradient of ``(root * weights).sum()`` at the edges; the engine runs nothing else."""
    if not edges:
        return ()
    # A scalar needs no gradient to start from, whose checks make torch import sympy.
    with torch.enable_grad(), unpacked():
        total = root.sum() if weights is None else (root * weights.to(root.dtype)).sum()
    try:
        start = torch.ones_like(total)
        return run_engine([total], [start], retain_graph, False, edges, allow_unreachable=True, accumulate=False)
    except RuntimeError as error:
        raise_explained("the graph of the losses", error)


def pull(edge: GradientEdge, gradients: Tensor, leaf: GradientEdge) -> Tensor:
    """Carry one gradient per sample, stacked, from an edge down to the leaf beneath it.

    The leaf is named by its edge: its tensor may have been frozen, or converted, since it was used.
    """
    with explain_errors("what a shared value was made from"):
        try:
            with torch.no_grad():
                (answer,) = torch.autograd.grad(
                    [edge], [leaf], grad_outputs=[gradients], is_grads_batched=True, retain_graph=True
                )
        except RuntimeError:  # some node cannot be batched: one at a time is slower and as right
            _refuse_converted(edge)
            alone = [torch.autograd.grad([edge], [leaf], grad_outputs=[one], retain_graph=True)[0] for one in gradients]
            answer = torch.stack([part.to_dense() if part.is_sparse else part for part in alone])
    return answer


def _refuse_converted(edge: GradientEdge) -> None:
    """Raise where a tensor that a value was made from has another dtype now: the graph cannot be run any more."""
    for node in filter(graph.is_leaf, graph.walk([edge])):
        before, now = graph.describe(node)[0].dtype, graph.leaf_tensor(node).dtype
        if before != now:
            raise UnsupportedOperationError(
                f"per_sample: a parameter of shape {tuple(graph.leaf_tensor(node).shape)} was converted from {before} "
                f"to {now} since the call, and is not used as it is: the gradient of what was made from it can no "
                "longer be computed. Query before you convert the model."
            )


def run_inside_engine(question: Callable[[], T]) -> T:
    """Run `question` while the engine is running.

    A checkpoint computes its region again for every value that is unpacked outside the engine, and once for
    all values that are unpacked inside one run of it.
    """
    answers: list[T] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        # Not `grad`: an op that is run inside it leaves out what that was not asked for.
        torch.autograd.backward(_Ask.apply(start, question, answers))  # type: ignore[no-untyped-call]
    return answers[0]


class _Ask(torch.autograd.Function):
    # A class made anew for every question would be a cycle, and keep the answer alive until it is collected.
    @staticmethod
    def forward(ctx: Any, x: Tensor, question: Callable[[], T], answers: list[T]) -> Tensor:
        ctx.question, ctx.answers = question, answers
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.answers.append(ctx.question())
        return g, None, None
