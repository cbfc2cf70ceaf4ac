"""From losses to per-sample gradients: read the graph, find the cuts, run the engine once, apply the rules of ops."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch.nodes import is_torchs_own
from ..errors import UnsupportedOperationError
from . import engine, ops
from .coupling.data_rows import DataRows, ModelTensors
from .cuts import ALONE, Cuts, find_cuts
from .engine import Gradients, Losses
from .gate.unsupported import as_at_the_call
from .ops.rules import RuleContext
from .ops.table import entry_of, input_shape
from .ops.views import reshape
from .owners.use_sites import UseSite
from .representations.base import Computed, Dense, Outer, SampleGrads, merged, stored
from .representations.members import Members
from .representations.numerics import HALF_TYPES
from .representations.rows import Rows
from .tracing import structure


def capture(
    losses: Losses,
    parameters: dict[str, Tensor],
    model: nn.Module | None,
    budget: int,
    *,
    allow_coupling: bool,
    allow_opaque: bool,
    retain_graph: bool,
) -> tuple[dict[str, SampleGrads], str | None, int]:
    """Find per-sample gradients of every parameter that the losses depend on.

    Args:
        losses: what is differentiated.
        parameters: what to differentiate with respect to.
        model: the model, if there is one.
        budget: how many bytes may be spent on stored gradients.
        allow_coupling: accept losses that depend on other samples.
        allow_opaque: take ops nobody can look into one sample at a time.
        retain_graph: whether the graph is to be kept, or let go of as it is read.

    Returns:
        The gradients, how owners were found, and what is left of the budget.
    """
    names = {id(tensor): name for name, tensor in parameters.items()}
    leaves = {i: names[id(tensor)] for i, tensor in losses.scan.leaves.items() if id(tensor) in names}
    used = {name: leaf for name, leaf in parameters.items() if name in set(leaves.values())}
    if losses.samples <= 1:
        return _each_alone(losses, used, retain_graph), None, budget
    if not (losses.has_hooks and allow_coupling):
        known = ModelTensors(parameters, model, losses.root.numel())
        with structure():
            cuts, rows = find_cuts(leaves, losses, known, allow_coupling=allow_coupling)
        if losses.scan.custom and not allow_opaque:
            _refuse_opaque(cuts.uses, leaves, losses.scan.nodes)
        if not losses.has_hooks and all(map(_is_linear, losses.scan.custom)):
            grads, left = _by_rules(cuts, rows, leaves, losses, budget, retain_graph)
            return {name: grads[name] for name in used if name in grads}, cuts.source, left
        if rows.waiting:
            engine.run_inside_engine(rows.add_waiting)
            rows.refuse_conflict()
    return _each_alone(losses, used, retain_graph), ALONE, budget


def _by_rules(
    cuts: Cuts,
    rows: DataRows,
    leaves: Mapping[int, str],
    losses: Losses,
    budget: int,
    retain_graph: bool,
) -> tuple[dict[str, SampleGrads], int]:
    """Run the engine once, and let the rules make per-sample gradients of every use of every parameter.

    The rules are applied on the engine's way, or afterwards where they have to wait.

    Returns:
        The gradients of each parameter, by its name; and what is left of the memory budget.
    """
    nodes = losses.scan.nodes
    at_node: dict[Node, list[UseSite]] = {}
    for use in cuts.uses:
        at_node.setdefault(nodes[use.node], []).append(use)
    times_used = Counter([leaves[leaf] for use in cuts.uses for leaf in use.leaves])
    grads: dict[int, list[SampleGrads]] = {leaf: [] for use in cuts.uses for leaf in use.leaves}
    # Those that could not keep their representation down to the leaf, with the value at which they stopped.
    above: dict[int, list[tuple[SampleGrads, GradientEdge]]] = {}
    # A checkpoint hands out each saved value once in a run of the engine: to an op, or to its rule. Data that other ops
    # keep in one is looked at as well, for rows that several samples use.
    all_wait = not rows.packed.isdisjoint(at_node)
    inside_engine = all_wait or bool(rows.waiting)
    running = ops.running_op({use.op for use in cuts.uses})
    release_graph = not (inside_engine or running or retain_graph)
    # Ops whose rules were not applied, and the gradients at their outputs; none arrive at those that stay.
    waiting: dict[Node, Gradients] = {node: (None,) * len(cuts.owners[at_node[node][0].node]) for node in at_node}

    def show(node: Node, gradients: Gradients) -> None:
        waiting[node] = gradients
        if not all_wait and not running.intersection([use.op for use in at_node[node]]):
            apply(node)

    def apply(node: Node) -> None:
        nonlocal budget
        gradients, saved = waiting.pop(node), dict[str, Any]()
        owners = cuts.owners[at_node[node][0].node]
        uses = [
            RuleContext(use.op, node, use.position, use.shape, gradients, owners, losses.samples, saved)
            for use in at_node[node]
        ]
        if node in rows.packed:
            rows.add_packed(node, uses[0].saved)
        for use, made in zip(at_node[node], ops.apply(uses), strict=True):
            if release_graph and made.runs_op:  # its rule gave up, and the op is about to forget what it saved
                made = Dense(engine.run_inside_engine(made.dense))
            for leaf in use.leaves:
                below, edge = _through_views(made, GradientEdge(nodes[use.value], use.output_nr), nodes[leaf])
                if edge.node is not nodes[leaf]:
                    above.setdefault(leaf, []).append((below, edge))
                    continue
                if release_graph and times_used[leaves[leaf]] == 1:  # what it is made of can be let go of at once
                    below, budget = stored(below, budget)
                grads[leaf].append(below)

    def apply_waiting() -> None:
        for node in list(waiting):
            apply(node)
        rows.add_waiting()

    stops = [nodes[i] for i in cuts.stops]
    with torch.no_grad():  # as inside the engine
        engine.show_gradients(losses.root, None, at_node, stops, show, retain_graph=not release_graph)
        if inside_engine:
            engine.run_inside_engine(apply_waiting)
        elif waiting:
            apply_waiting()
    if inside_engine:
        rows.refuse_conflict()
    for leaf, stopped in above.items():
        grads[leaf].append(_through_engine(stopped, nodes[leaf]))
    return {leaves[leaf]: merged(uses) for leaf, uses in grads.items()}, budget


def _each_alone(losses: Losses, leaves: Mapping[str, Tensor], retain_graph: bool) -> dict[str, SampleGrads]:
    """Differentiate the loss of each sample in a run of its own, whatever happens on the way."""
    if not losses.samples:
        return {name: Dense(leaf.new_zeros(0, *leaf.shape)) for name, leaf in leaves.items()}
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    rows: dict[str, Tensor] = {}
    for sample in range(losses.samples):
        only = losses.weights_of_entries(torch.arange(losses.samples) == sample)
        keep = retain_graph or sample < losses.samples - 1
        with losses.unspoilt():
            gradients = engine.gradients_at(losses.root, only, edges, retain_graph=keep)
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                if name not in rows:
                    size = (losses.samples, *leaves[name].shape)
                    rows[name] = torch.zeros(size, dtype=gradient.dtype, device=gradient.device)
                rows[name][sample] = (gradient.to_dense() if gradient.is_sparse else gradient).detach()
    return {name: Dense(rows[name]) for name in leaves if name in rows}


def _is_linear(node: Node) -> bool:
    """Return whether a Function's backward is known to be linear: torch's own are; a rule or a declaration vouches."""
    return ops.has_rule(node) or is_torchs_own(node) or ops.samplewise(node) is not None


def _refuse_opaque(uses: list[UseSite], leaves: Mapping[int, str], nodes: list[Node]) -> None:
    for use in uses:
        if graph.is_custom(nodes[use.node]) and not ops.has_rule(nodes[use.node]):
            below = [leaves[leaf] for leaf in use.leaves]
            compiled = use.op == "CompiledFunctionBackward"
            rule = f"Give it a rule: gradrein.register_rule({use.op.removesuffix('Backward')}, rule)"
            advice = "Compile the whole step with gradrein.compile instead" if compiled else rule
            raise UnsupportedOperationError(
                f"per_sample: `{', '.join(below)}` is used by `{use.op}`, a custom Function (or "
                f"a compiled region) that cannot be looked into. {advice}; or pass allow_opaque=True to run its "
                "backward once per sample.",
                use.op,
                below[0] if below else "",
            )


_SAME = frozenset({"ToCopyBackward0", "CloneBackward0", "AliasBackward0"})


def _through_views(grads: SampleGrads, value: GradientEdge, leaf: Node) -> tuple[SampleGrads, GradientEdge]:
    """Go down from a value to the leaf it is made from, as far as gradients can stay in their representation.

    A transposed weight, a cast one and a look-up do. Everything else goes through the engine.
    """
    while value.node is not leaf and (below := _through_view(grads, value.node)) is not None:
        grads = below
        node, output_nr = value.node.next_functions[0]
        assert node is not None
        value = GradientEdge(node, output_nr)
    return grads, value


def _through_view(grads: SampleGrads, node: Node) -> SampleGrads | None:
    """Go down by one op, if the gradients can stay in their representation."""
    name = node.name()
    if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
        return None
    if name in _SAME:
        return grads
    if name == "TBackward0":
        return grads.swapped((-2, -1)) if len(grads.shape) == 2 else grads
    if name == "TransposeBackward0":
        rank = len(grads.shape)
        first, second = sorted(engine.saved(node, dim) % rank - rank for dim in ("dim0", "dim1"))
        return grads.swapped((first, second))
    if name == "PermuteBackward0" and len(grads.shape) == 2:  # ``weight.T``
        return grads if engine.saved(node, "dims")[0] in (0, -2) else grads.swapped((-2, -1))
    if name == "SelectBackward0" and isinstance(grads, Outer) and engine.saved(node, "dim") % 3 == 0:
        count = input_shape(node)[0]
        return Members.of(grads.left, grads.right, engine.saved(node, "index") % count, count)
    if not isinstance(grads, Dense):
        return None
    if name == "EmbeddingBackward0":
        return _looked_up(grads.values, node)
    entry = entry_of(node)
    is_reshape = entry is not None and entry.owners is reshape
    return Dense(grads.values.reshape(grads.samples, *input_shape(node))) if is_reshape else None


def _looked_up(stored: Tensor, node: Node) -> SampleGrads | None:
    """Ids that all samples share, such as positions: the table's gradient touches only those rows."""
    if engine.saved(node, "scale_grad_by_freq"):
        return None
    table = input_shape(node)
    ids = engine.saved(node, "indices").reshape(1, -1)
    values = stored.reshape(len(stored), -1, table[1])
    padding = engine.saved(node, "padding_idx")
    if 0 <= padding < table[0]:
        values = values * (ids != padding)[..., None]
    return Rows(ids.expand(len(stored), -1), values, table)


def _through_engine(uses: Sequence[tuple[SampleGrads, GradientEdge]], leaf: Node) -> SampleGrads:
    """Return the gradients of a leaf, given those of values that it was made into.

    All uses and all samples go through the engine at once, or samples one by one where that cannot be.
    """
    each, edges = zip(*uses, strict=True)
    samples, shape = each[0].samples, graph.leaf_tensor(leaf).shape
    dtypes = [graph.describe(edge.node)[edge.output_nr].dtype for edge in edges]
    checks = [as_at_the_call(edge) for edge in edges]

    def pull(gradients: Iterable[Tensor]) -> Tensor:
        for check in checks:
            check()
        converted = [one.to(dtype) for one, dtype in zip(gradients, dtypes, strict=True)]
        return engine.pull(edges, converted, GradientEdge(leaf, 0))

    def dense(part: slice) -> Tensor:
        return pull(grads.dense(part) for grads in each)

    def weighted(weights: Tensor) -> Tensor:
        if not HALF_TYPES.isdisjoint(dtypes):  # clipped, they may be smaller than half precision can hold
            return Computed(samples, shape, dense).weighted(weights)
        return pull(grads.weighted(weights)[None] for grads in each)[0]

    strategy = "+".join(dict.fromkeys(grads.strategy for grads in each)) + ", pulled"
    held = [tensor for grads in each for tensor in grads.held_tensors]
    return Computed(samples, shape, dense, weighted, held_tensors=held, strategy=strategy)
