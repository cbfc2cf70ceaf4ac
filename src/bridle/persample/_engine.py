"""Runs of torch's engine over parts of a graph, and what its nodes saved."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch import checkpoint, hooks
from .._torch import saved as torch_saved
from .._torch.signature import fields
from ._graph_errors import explain_errors

T = TypeVar("T")


def saved(node: Node, name: str) -> Any:
    """Return one value the node saved, or say why it cannot be had."""
    with explain_errors(f"what `{graph.op(node)}` saved as `{name}`"):
        return getattr(node, f"_saved_{name}")


def saved_number(node: Node, name: str) -> int:
    """Return an integer the node saved: torch hands out those below zero as unsigned ones."""
    number: int = saved(node, name)
    return number - 2**64 if number >= 2**63 else number


def is_packed(node: Node) -> bool:
    """Return whether saved-tensor hooks, such as those of a checkpoint, stand before what the node saved."""
    raws = ((name.removeprefix("_raw_saved_"), getattr(node, name)) for name in fields(type(node))[0])
    single = ((name, handle) for name, handle in raws if not isinstance(handle, tuple | list))
    return any(torch_saved.is_packed(node, name, handle) for name, handle in single)


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the tensors the node saved of its inputs and still holds."""
    read = partial(graph.saved, node, unpack=True)
    found = inside_engine(read) if is_packed(node) else read()
    entries = [entry for entry in found if not entry.name.startswith("result")]
    return [entry.value for entry in entries if isinstance(entry.value, Tensor)]


def saves_tensors(node: Node) -> bool:
    """Return whether the op is of a kind that saves tensors."""
    return graph.is_custom(node) or bool(fields(type(node))[0])


def passes_unchanged(edge: GradientEdge) -> bool:
    """Return whether no hook on the tensor at this edge changes a gradient that is sent there."""
    described = graph.describe(edge.node)[edge.output_nr]
    given = torch.ones(described.shape, dtype=described.dtype, device=described.device)
    (found,) = torch.autograd.grad([edge], [edge], [given], retain_graph=True)
    return found.data_ptr() == given.data_ptr() and found._version == 0


def call(node: Node, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run one node of the graph by itself and return what it hands to each of its ``next_functions``."""
    run: Any = node.apply if graph.is_custom(node) else node  # type: ignore[attr-defined]
    with explain_errors(f"`{graph.op(node)}`"):
        answer = run(*gradients)
    answer = answer if isinstance(answer, tuple) else (answer,)
    if not graph.is_custom(node):
        return answer
    # A custom Function answers for all its arguments, also for those that are no tensors and have no edge.
    needed = zip(answer, node.needs_input_grad, strict=False)  # type: ignore[attr-defined]
    wanted = iter([g for g, is_needed in needed if is_needed])
    return tuple(None if used is None else next(wanted) for used, _ in node.next_functions)


def visit(
    root: Tensor,
    weights: Tensor,
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
        weights: one weight per loss.
        passed: ops that the engine runs on its way to the ends.
        ends: ops below which it does not go; they are not run.
        see: called once for each op that gets a gradient, before the engine runs it.
        retain_graph: whether ops keep what they saved when they have run.
    """
    ends = list(ends)
    edges = [GradientEdge(node, i) for node in ends for i in range(len(graph.describe(node)))]
    if not edges:
        return
    handles = hooks.register_prehooks(passed, lambda node: partial(see, node))
    try:
        found = iter(gradients_at(root, weights, edges, retain_graph=retain_graph))
    finally:
        for handle in handles:
            handle.remove()
    for node in ends:
        see(node, tuple(next(found) for _ in graph.describe(node)))


def gradients_at(
    root: Tensor, weights: Tensor, edges: Sequence[GradientEdge], *, retain_graph: bool = True
) -> tuple[Tensor | None, ...]:
    """Return the gradient of ``(root * weights).sum()`` at the edges; the engine runs nothing else."""
    if not edges:
        return ()
    with ExitStack() as stack:
        for node in bypassed(root):
            count = len(node.needs_input_grad)  # type: ignore[attr-defined]
            stack.enter_context(checkpoint.override_backward(node, lambda *_, count=count: (None,) * count))
        stack.enter_context(explain_errors("the graph of the losses"))
        with torch.enable_grad():  # a scalar needs no gradient to start from, whose checks make torch import sympy
            total = (root * weights.to(root.dtype)).sum()
        return torch.autograd.grad(total, list(edges), retain_graph=retain_graph, allow_unused=True)


def bypassed(root: Tensor) -> tuple[Node, ...]:
    """Return the nodes that hand on nothing, since what they stand for hangs from the root itself."""
    found: tuple[Node, ...] = getattr(root.grad_fn, "bypassed", ())
    return found


def pull(edge: GradientEdge, gradients: Tensor, leaf: Tensor) -> Tensor:
    """Carry one gradient per sample, stacked, from an edge down to the leaf beneath it."""
    with explain_errors("what a shared value was made from"):
        try:
            with torch.no_grad():
                (answer,) = torch.autograd.grad(
                    [edge], [leaf], grad_outputs=[gradients], is_grads_batched=True, retain_graph=True
                )
        except RuntimeError:  # some node cannot be batched: one at a time is slower and as right
            alone = [torch.autograd.grad([edge], [leaf], grad_outputs=[one], retain_graph=True)[0] for one in gradients]
            answer = torch.stack([part.to_dense() if part.is_sparse else part for part in alone])
    return answer


def inside_engine(question: Callable[[], T]) -> T:
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


_FIELDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}
