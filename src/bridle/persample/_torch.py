"""Everything private in torch that this room touches, checked on torch 2.13.0 and 2.15.0."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils import _pytree

from .. import graph
from ..errors import GraphStateError

T = TypeVar("T")


def saved(node: Node, name: str) -> Any:
    """Return one value the node saved, or say why it cannot be had."""
    try:
        return getattr(node, f"_saved_{name}")
    except RuntimeError as error:
        raise GraphStateError(
            f"per_sample: `{graph.op(node)}` can no longer give its saved `{name}`. The graph was freed by a "
            "backward pass, or a tensor it needs was changed in place since the forward pass. Ask before "
            f"calling backward, or call backward with retain_graph=True. torch says: {error}"
        ) from error


def is_packed(node: Node) -> bool:
    """Tell whether saved-tensor hooks, such as those of a checkpoint, stand before what the node saved."""
    raws = (getattr(node, name) for name in _raw_fields(type(node)))
    return any(handle.unpack_hook is not None for handle in raws if hasattr(handle, "unpack_hook"))


def plain_values(node: Node) -> tuple[Any, ...]:
    """Return the sizes, dims and flags that the node saved: everything that is not a tensor."""
    return tuple(_hashable(getattr(node, name)) for name in _plain_fields(type(node)))


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the tensors the node saved of its inputs and still holds, without unpacking what is packed."""
    entries = [entry for entry in graph.saved(node) if not entry.name.startswith("result")]
    return [entry.value for entry in entries if isinstance(entry.value, Tensor)]


def call(node: Node, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run one node of the graph by itself and return what it hands to each of its inputs."""
    run: Any = node.apply if graph.is_custom(node) else node  # type: ignore[attr-defined]
    answer = run(*gradients)
    return answer if isinstance(answer, tuple) else (answer,)


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
    with torch.enable_grad():  # a scalar needs no gradient to start from, whose checks make torch import sympy
        scalar = (root * weights).sum()
    hooks = [node.register_prehook(partial(see, node)) for node in passed]
    try:
        found = iter(torch.autograd.grad(scalar, edges, retain_graph=retain_graph, allow_unused=True))
    finally:
        for hook in hooks:
            hook.remove()
    for node in ends:
        see(node, tuple(next(found) for _ in graph.describe(node)))


def pull(edge: GradientEdge, gradients: Tensor, leaf: Tensor) -> Tensor:
    """Carry one gradient per sample, stacked, from an edge down to the leaf beneath it."""
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

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, g: Tensor) -> Tensor:
            answers.append(question())
            return g

    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        # Not `grad`: an op that is run inside it leaves out what that was not asked for.
        torch.autograd.backward(Ask.apply(start))  # type: ignore[no-untyped-call]
    return answers[0]


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return what nested containers hold, and a function that puts other things into their places."""
    leaves, spec = _pytree.tree_flatten(tree)
    return leaves, lambda others: _pytree.tree_unflatten(others, spec)


_FIELDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}


def _fields(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if kind not in _FIELDS:
        names = dir(kind)
        raw = tuple(name for name in names if name.startswith("_raw_saved_"))
        plain = tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in raw)
        _FIELDS[kind] = raw, plain
    return _FIELDS[kind]


def _raw_fields(kind: type) -> tuple[str, ...]:
    return _fields(kind)[0]


def _plain_fields(kind: type) -> tuple[str, ...]:
    return _fields(kind)[1]


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list | tuple) else value
