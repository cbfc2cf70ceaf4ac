"""Runs of torch's engine over a recorded graph, what its nodes saved, and torch's errors about it in our words."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch import hooks
from .._torch.engine import run_engine
from .._torch.nodes import output_metadata
from .._torch.saved import packed_nodes, unpacked
from .._torch.signature import Scan, scan
from ..autograd import explain_saved
from ..errors import GradreinError, UnsupportedOperationError
from . import tracing


def raise_explained(where: str, error: RuntimeError, node: Node) -> NoReturn:
    """Raise what torch's error about a node means for `where`; one that is not known, or ours, as it is."""
    if isinstance(error, GradreinError):
        raise error
    advice = (
        f"per_sample needs {where}: query before that is freed or changed, and pass retain_graph=True to an earlier "
        "per_sample of the same losses."
    )
    explained = explain_saved(error, GradientEdge(node, 0), advice) or _explanation(where, str(error))
    if explained is None:
        raise error
    raise explained from error


def refuse_nested(losses: Tensor) -> None:
    """Refuse a graph that goes through nested tensors, which have no shape that owners could be told by.

    Raises:
        UnsupportedOperationError: there is a nested tensor.
    """
    for node in graph.walk([losses]):
        leaf = graph.is_leaf(node)
        if graph.leaf_tensor(node).is_nested if leaf else any(out.is_nested_tensor for out in output_metadata(node)):
            found = "an input" if leaf else f"what `{graph.op(node)}` makes"
            raise UnsupportedOperationError(
                f"per_sample: {found} is a nested tensor, which has no rows by which to separate samples. Pad before "
                "the first layer, nested.to_padded_tensor(0.0), and mask what was padded; or run the model on "
                "each of nested.unbind() and stack the losses.",
                graph.op(node),
            )


def _explanation(where: str, torch_says: str) -> GradreinError | None:
    if "already unpacked once" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: {where} is needed twice, and the checkpoint around it provides it only once. Remove the "
            "checkpoint from that region.",
        )
    if "donated buffers" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: {where} goes through a compiled region that overwrites what it saved, so its backward can "
            "run only once. Set torch._functorch.config.donated_buffer = False before the region is compiled, or "
            "leave it uncompiled.",
            "CompiledFunctionBackward",
        )
    if "_will_engine_execute_node" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: a hook waits for the gradients of several tensors, parameters among them, in {where}. torch "
            "runs such hooks only in backward(), not in functions that return gradients. Remove the handle that "
            f"register_multi_grad_hook returned, or register it with mode='any'. torch says: {torch_says}"
        )
    return None


T = TypeVar("T")
Gradients: TypeAlias = tuple[Tensor | None, ...]
# Is shown an op and the gradients at its outputs.
ShowGradients: TypeAlias = Callable[[Node, Gradients], None]


def call(node: Node, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run one node of the graph by itself and return what it hands to each of its ``next_functions``."""
    run: Any = node
    if graph.is_custom(node):
        # The engine hands zeros to a Function for outputs without a gradient, unless it was told not to.
        run, outs = node.apply, graph.describe(node)  # type: ignore[attr-defined]
        if any(g is None and not out.shape for g, out in zip(gradients, outs, strict=True)):
            return _call_through_engine(node, gradients)
        gradients = [_zeros(out) if g is None else g for g, out in zip(gradients, outs, strict=True)]
    try:
        answer = run(*gradients)
    except RuntimeError as error:
        raise_explained(f"`{graph.op(node)}`", error, node)
    answer = answer if isinstance(answer, tuple) else (answer,)
    if not graph.is_custom(node):
        return answer
    # A custom Function answers for all its arguments, also for those that are no tensors and have no edge.
    needed = zip(answer, node.needs_input_grad, strict=False)  # type: ignore[attr-defined]
    wanted = iter([g for g, is_needed in needed if is_needed])
    return tuple(None if used is None else next(wanted) for used, _ in node.next_functions)


def _call_through_engine(node: Node, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Run a Function of which an output is None or a scalar: torch does not tell which, and only its engine knows."""
    inputs = [GradientEdge(used, nr) for used, nr in node.next_functions if used is not None]
    if len({(edge.node, edge.output_nr) for edge in inputs}) < len(inputs):
        raise UnsupportedOperationError(
            f"per_sample: `{graph.op(node)}` takes one tensor twice, and has an output without a gradient. Pass it a "
            "view, x.view_as(x), in one of the places.",
            graph.op(node),
        )
    outputs = [GradientEdge(node, i) for i, g in enumerate(gradients) if g is not None]
    starts = [g for g in gradients if g is not None]
    found = iter(torch.autograd.grad(outputs, inputs, starts, retain_graph=True, allow_unused=True))
    return tuple(None if used is None else next(found) for used, _ in node.next_functions)


def _zeros(out: graph.OutputInfo) -> Tensor:
    return torch.zeros(out.shape, dtype=out.dtype, device=out.device)


def show_gradients(
    root: Tensor,
    weights: Tensor | None,
    nodes: Iterable[Node],
    stops: Collection[Node],
    show: ShowGradients,
    *,
    retain_graph: bool,
) -> None:
    """Differentiate ``(root * weights).sum()`` and show the gradients at the outputs of these ops.

    Each is shown when the engine comes by, so that nothing is kept which `show` does not keep.

    Args:
        root: one loss per entry.
        weights: one weight per loss; all count alike without them.
        nodes: the ops.
        stops: those of them below which there is no other; the engine does not run them.
        show: called once for each op that gets a gradient, before the engine runs it.
        retain_graph: whether ops keep what they saved when they have run.
    """
    last = set(stops)
    edges = [GradientEdge(node, i) for node in stops for i in range(len(output_metadata(node)))]
    if not edges:
        return
    handles = hooks.register_prehooks([n for n in nodes if n not in last], lambda node: partial(show, node))
    try:
        at_stops = gradients_at(root, weights, edges, retain_graph=retain_graph)
    finally:
        for handle in handles:
            handle.remove()
    for node, here in groupby(zip(edges, at_stops, strict=True), lambda pair: pair[0].node):
        show(node, tuple(gradient for _, gradient in here))


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
        raise_explained("the graph of the losses", error, graph.edge_of(root).node)


def pull(edges: Sequence[GradientEdge], gradients: Sequence[Tensor], leaf: GradientEdge) -> Tensor:
    """Carry one gradient per sample, stacked, from some edges down to the leaf beneath them, and add them up.

    The leaf is named by its edge: its tensor may have been frozen, or converted, since it was used.
    """
    run = partial(torch.autograd.grad, edges, [leaf], retain_graph=True)
    try:
        with torch.no_grad():
            (answer,) = run(grad_outputs=gradients, is_grads_batched=True)
        return answer
    except RuntimeError:  # some node cannot be batched: one at a time is slower and as right
        pass
    try:
        alone = [run(grad_outputs=one)[0] for one in zip(*gradients, strict=True)]
    except RuntimeError as error:
        raise_explained("what a shared value was made from", error, edges[0].node)
    return torch.stack([part.to_dense() if part.is_sparse else part for part in alone])


def run_inside_engine(question: Callable[[], T]) -> T:
    """Run `question` while the engine is running.

    A checkpoint computes its region again for every value that is unpacked outside the engine, and once for
    all values that are unpacked inside one run of it.
    """
    answers: list[T] = []
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True).clone()
    (handle,) = hooks.register_prehooks([graph.edge_of(start).node], lambda _: lambda _: answers.append(question()))
    try:
        # Not `grad`: an op that is run inside it leaves out what that was not asked for.
        torch.autograd.backward(start)
    finally:
        handle.remove()
    return answers[0]


def saved(node: Node, name: str) -> Any:
    """Return one value the node saved, numbers as Python counts them, or say why it cannot be had."""
    try:
        return signed(getattr(node, f"_saved_{name}"))
    except RuntimeError as error:
        raise_explained(f"what `{graph.op(node)}` saved as `{name}`", error, node)


def signed(value: Any) -> Any:
    """Undo torch's habit of handing out negative numbers as unsigned ones."""
    if isinstance(value, tuple | list):
        return tuple(signed(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 63:
        return value - (1 << 64)
    return value


def is_packed(node: Node) -> bool:
    """Return whether saved-tensor hooks, such as those of a checkpoint, stand before what the node saved."""
    return bool(packed_nodes([node]))


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the tensors the node saved of its inputs and still holds."""
    read = partial(graph.saved, node, unpack=True)
    values = run_inside_engine(read) if is_packed(node) else read()
    entries = [entry for entry in values if not entry.name.startswith("result")]
    return [entry.value for entry in entries if isinstance(entry.value, Tensor)]


@dataclass(eq=False)
class Losses:
    """What is differentiated.

    Attributes:
        root: one loss per entry.
        sample_of: which sample each entry counts for.
        samples: how many samples there are.
        has_hooks: whether there are hooks, which are to be given no gradients but those of each loss.
    """

    root: Tensor
    sample_of: Sequence[int]
    samples: int
    has_hooks: bool = False

    @cached_property
    def scan(self) -> Scan:
        """The graph recorded behind the losses, in one pass: enough to recognise it."""
        root = self.root
        return scan(graph.edge_of(root).node if root.requires_grad and root.is_leaf else root.grad_fn)

    @cached_property
    def read(self) -> graph.Graph:
        """The same with the uses of each output."""
        return graph.read(self.root)

    @cached_property
    def number(self) -> dict[Node, int]:
        """The number of each node in `scan.nodes`."""
        return {node: i for i, node in enumerate(self.scan.nodes)}

    def show(self, nodes: Sequence[Node], weights: Tensor, show: ShowGradients) -> None:
        """Show the gradients at the outputs of these ops, the loss of each sample times its weight."""
        above = self.read.leading_to(set(nodes))
        stops = [node for node in nodes if node not in above]
        with self.unspoilt():
            show_gradients(self.root, self.weights_of_entries(weights), nodes, stops, show, retain_graph=True)

    @contextmanager
    def unspoilt(self) -> Iterator[None]:
        """Put back what Functions have saved when the engine has run.

        Some overwrite it, since a backward pass runs once; where a kernel does that, no version counter tells.
        """
        kept = self._kept
        try:
            yield
        finally:
            for tensor, before in kept:
                if not tensor.equal(before):
                    tensor.data.copy_(before)

    @cached_property
    def _kept(self) -> list[tuple[Tensor, Tensor]]:
        """What Functions saved, each with a copy. What hooks have packed is made anew for each run."""
        if tracing.is_traced():
            return []
        values: list[Any] = []
        for node in set(self.scan.custom) - packed_nodes(self.scan.custom):
            with suppress(RuntimeError):  # freed, or changed in place: the engine says so
                values += [*node.saved_tensors, *vars(node).values()]  # type: ignore[attr-defined]
        plain = [x for x in values if type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided]
        return [(x, x.detach().clone()) for x in plain]

    def weights_of_entries(self, weights: Tensor) -> Tensor:
        """Return the weight of each entry, given those of samples."""
        return weights.to(self.root)[torch.tensor(self.sample_of, dtype=torch.int64, device="cpu")]
