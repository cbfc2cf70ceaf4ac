"""From losses to per-sample gradients: read the graph, find the cuts, run the engine once, apply the ops."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import graph
from .._torch.nodes import is_torchs_own
from ..errors import UnsupportedOperationError
from . import engine, ops
from ._pullback import pull_back
from .coupling.data_rows import DataRows
from .cuts.find import ALONE, Cuts, coarsest_eps, find
from .engine import Gradients, Losses
from .ops.context import RuleContext
from .owners.cuts import UseSite
from .owners.model_tensors import ModelTensors
from .representations.base import Dense, SampleGrads
from .representations.sum import merged
from .tracing import structure


@dataclass(frozen=True)
class Options:
    """What the user allows.

    Attributes:
        coupling: losses that depend on other samples.
        opaque: ops nobody can look into, taken one sample at a time.
        retain_graph: whether the graph is to be kept, or let go of as it is read.
        memory_budget: how many bytes may be spent on written-down gradients.
    """

    coupling: bool
    opaque: bool
    retain_graph: bool
    memory_budget: int


def capture(
    losses: Losses, parameters: dict[str, Tensor], model: nn.Module | None, options: Options, *, alone: bool
) -> tuple[dict[str, SampleGrads], str | None, float, int]:
    """Find per-sample gradients of every parameter that the losses depend on.

    Args:
        losses: what is differentiated.
        parameters: what to differentiate with respect to.
        model: the model, if there is one.
        options: what the user allows.
        alone: whether each loss has to be differentiated in a run of its own.

    Returns:
        The gradients, how owners were found, rounding of the coarsest dtype, and what is left of the memory budget.
    """
    names = {id(tensor): name for name, tensor in parameters.items()}
    leaves = {i: names[id(tensor)] for i, tensor in losses.scan.leaves.items() if id(tensor) in names}
    used = {name: leaf for name, leaf in parameters.items() if name in set(leaves.values())}
    if losses.samples <= 1:
        return _each_alone(losses, used, options), None, 0.0, options.memory_budget
    if not (alone and options.coupling):
        known = ModelTensors(parameters, model, losses.root.numel())
        with structure():
            cuts, rows = find(leaves, losses, known, allow_coupling=options.coupling, may_run=not alone)
        if losses.scan.custom and not options.opaque:
            _refuse_opaque(cuts.uses, leaves, losses.scan.nodes)
        if not alone and all(map(_is_linear, losses.scan.custom)):
            forms, left = _by_rules(cuts, rows, leaves, losses, options)
            return {name: forms[name] for name in used if name in forms}, cuts.source, cuts.eps, left
        if not options.coupling:
            _look_at_packed_data(rows)
    each = _each_alone(losses, used, options)
    return each, ALONE, coarsest_eps(losses.scan.nodes), options.memory_budget


def _by_rules(
    cuts: Cuts, rows: DataRows, leaves: Mapping[int, str], losses: Losses, options: Options
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
    times = Counter([leaves[leaf] for use in cuts.uses for leaf in use.leaves])
    forms: dict[str, list[SampleGrads]] = {name: [] for name in times}
    left = options.memory_budget
    # A checkpoint hands out each saved value once in a run of the engine: to an op, or to its rule.
    all_wait = not rows.packed.isdisjoint(at_node)
    running = ops.running_op({use.op for use in cuts.uses})
    # Data that other ops keep in a checkpoint is looked at as well, for rows that several samples use.
    looked_at = [] if options.coupling else rows.waiting(at_node)
    free = not (all_wait or running or looked_at or options.retain_graph)
    late: list[tuple[Node, Gradients]] = []

    def see(node: Node, gradients: Gradients) -> None:
        if all_wait or any(use.op in running for use in at_node[node]):
            late.append((node, gradients))
        else:
            apply(node, gradients)

    def apply(node: Node, gradients: Gradients) -> None:
        nonlocal left
        cache: dict[str, Any] = {}
        seen.add(node)
        for use in at_node[node]:
            ctx = RuleContext(
                *(use.op, node, use.position, use.shape, gradients, cuts.layouts[use.node]),
                gradient=gradients[0],  # type: ignore[arg-type]  # a rule is not asked where it is None
                layout=cuts.layouts[use.node][0],
                samples=losses.samples,
                allow_coupling=options.coupling,
                _cache=cache,
            )
            if node in rows.packed:
                rows.add_packed(node, ctx.saved)
            form = ops.apply(ctx)
            if free and form.runs_op:  # its rule gave up, and the op is about to forget what it saved
                form = Dense(engine.run_inside_engine(form.dense))
            for leaf in use.leaves:
                lowered = form if use.value == leaf else pull_back(form, use.edge(nodes), nodes[leaf])
                # Write down what saves time, while what it is made of can be let go of at once.
                if free and times[leaves[leaf]] == 1 and lowered.flops_saved > 0 and lowered.nbytes() <= left:
                    left -= lowered.nbytes()
                    lowered = Dense(lowered.dense())
                forms[leaves[leaf]].append(lowered)

    def apply_late() -> None:
        for node, gradients in late:
            apply(node, gradients)
        for node in looked_at:
            rows.add_packed(node, partial(engine.saved, node))

    seen: set[Node] = set()
    passed, ends = ([nodes[i] for i in some] for some in (cuts.passed, cuts.ends))
    with torch.no_grad():  # as inside the engine
        engine.visit(losses.root, None, passed, ends, see, retain_graph=not free)
        waiting = {node for node, _ in late}
        late += [(n, (None,) * len(cuts.layouts[u[0].node])) for n, u in at_node.items() if n not in seen | waiting]
        if all_wait or looked_at:
            engine.run_inside_engine(apply_late)
        elif late:
            apply_late()
    if not options.coupling:
        rows.refuse_conflict()
    return {name: uses[0] if len(uses) == 1 else merged(uses) for name, uses in forms.items()}, left


def _look_at_packed_data(rows: DataRows) -> None:
    """Look at data that ops keep in a checkpoint, for rows that several samples use."""
    packed = rows.waiting(())

    def look() -> None:
        for node in packed:
            rows.add_packed(node, partial(engine.saved, node))

    if packed:
        engine.run_inside_engine(look)
        rows.refuse_conflict()


def _each_alone(losses: Losses, leaves: Mapping[str, Tensor], options: Options) -> dict[str, SampleGrads]:
    """Differentiate the loss of each sample in a run of its own, whatever happens on the way."""
    if not losses.samples:
        return {name: Dense(leaf.new_zeros(0, *leaf.shape)) for name, leaf in leaves.items()}
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    rows: dict[str, Tensor] = {}
    for sample in range(losses.samples):
        only = (losses.sample_of == sample).to(losses.root)
        keep = options.retain_graph or sample < losses.samples - 1
        gradients = engine.gradients_at(losses.root, only, edges, retain_graph=keep)
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                if name not in rows:
                    size = (losses.samples, *leaves[name].shape)
                    rows[name] = torch.zeros(size, dtype=gradient.dtype, device=gradient.device)
                rows[name][sample] = (gradient.to_dense() if gradient.is_sparse else gradient).detach()
    return {name: Dense(rows[name]) for name in leaves if name in rows}


def _is_linear(node: Node) -> bool:
    """Return whether a Function's backward is known to be linear: torch's own are, and a rule vouches for others."""
    return ops.has_rule(node) or is_torchs_own(node)


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
