"""From losses to per-sample gradients: read the graph, find the cuts, run the engine once, apply the ops."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
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
from .cuts.find import Found, Source, find
from .cuts.proofs import coarsest_eps
from .engine import Losses
from .engine.losses import Gradients
from .ops.context import RuleContext
from .owners.cuts import UseSite
from .owners.model_tensors import ModelTensors
from .queries.result import Captured
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
) -> Captured:
    """Return per-sample gradients of every parameter that the losses depend on.

    Args:
        losses: what is differentiated.
        parameters: what to differentiate with respect to.
        model: the model, if there is one.
        options: what the user allows.
        alone: whether each loss has to be differentiated in a run of its own.
    """
    names = {id(tensor): name for name, tensor in parameters.items()}
    nodes, tensors = losses.scan.nodes, losses.scan.leaves
    leaves = {nodes[i]: names[id(tensor)] for i, tensor in tensors.items() if id(tensor) in names}
    kept = losses if options.retain_graph else None
    if losses.samples <= 1:
        few = _each_alone(losses, _used(leaves, parameters), options)
        return Captured(losses.samples, few, None, 0.0, options.memory_budget, kept)
    found = None
    if not (alone and options.coupling):
        known = ModelTensors(parameters, model, losses.root.numel())
        with structure():
            found = find(leaves, losses, known, allow_coupling=options.coupling, may_run=not alone)
    if found is not None and losses.scan.custom and not options.opaque:
        _refuse_opaque(found.cuts, leaves)
    if found is not None and not alone and all(map(_is_linear, losses.scan.custom)):
        forms, left = _by_rules(found, leaves, losses, options)
        whole = {name: merged(forms[name]) for name in parameters if name in forms}
        return Captured(losses.samples, whole, found.source, found.eps, left, kept)
    if found is not None and not options.coupling:
        _look_at_packed_data(found)
    each = _each_alone(losses, _used(leaves, parameters), options)
    eps = coarsest_eps(losses.scan.nodes)
    return Captured(losses.samples, each, Source.ALONE, eps, options.memory_budget, kept)


def _used(leaves: dict[Node, str], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    used = set(leaves.values())
    return {name: leaf for name, leaf in parameters.items() if name in used}


def _by_rules(
    found: Found, leaves: dict[Node, str], losses: Losses, options: Options
) -> tuple[dict[str, list[SampleGrads]], int]:
    """Run the engine once, and let the rules make per-sample gradients of every use of every parameter.

    Returns:
        The gradients of each use, by the name of the parameter; and what is left of the memory budget.
    """
    cuts: dict[Node, list[UseSite]] = {}
    for cut in found.cuts:
        cuts.setdefault(cut.node, []).append(cut)
    uses = Counter([leaves[leaf] for cut in found.cuts for leaf in cut.leaves])
    forms: dict[str, list[SampleGrads]] = {name: [] for name in uses}
    left = options.memory_budget
    # A checkpoint hands out each saved value once in a run of the engine: to an op, or to its rule.
    all_wait = not found.rows.packed.isdisjoint(cuts)
    running = ops.running_op({cut.op for cut in found.cuts})
    waits = {cut.node for cut in found.cuts if all_wait or cut.op in running}
    # Data that other ops keep in a checkpoint is looked at as well, for rows that several samples use.
    looked_at = [] if options.coupling else found.rows.waiting(cuts)
    free = not waits and not looked_at and not options.retain_graph

    def apply(node: Node, gradients: Gradients) -> None:
        nonlocal left
        forms_here = _forms_at(node, cuts[node], gradients, found, losses.samples, options)
        for cut, form in zip(cuts[node], forms_here, strict=True):
            if free and form.runs_op:  # its rule gave up, and the op is about to forget what it saved
                form = Dense(engine.run_inside_engine(form.dense))
            for leaf in cut.leaves:
                name = leaves[leaf]
                lowered = form if cut.value.node is leaf else pull_back(form, cut.value, leaf)
                # Write down what saves time, while what it is made of can be let go of at once.
                if free and uses[name] == 1 and lowered.flops_saved > 0 and lowered.nbytes() <= left:
                    left -= lowered.nbytes()
                    lowered = Dense(lowered.dense())
                forms[name].append(lowered)

    _run(found, losses, apply, cuts, waits, looked_at, inside=all_wait, retain_graph=not free)
    if not options.coupling:
        found.rows.refuse_conflict()
    return forms, left


def _run(
    found: Found,
    losses: Losses,
    apply: Callable[[Node, Gradients], None],
    cuts: Collection[Node],
    waits: Collection[Node],
    looked_at: list[Node],
    *,
    inside: bool,
    retain_graph: bool,
) -> None:
    """Run the engine and apply the rules on its way, or afterwards where they have to wait.

    Args:
        found: the cuts.
        losses: what is differentiated.
        apply: applies the rules to an op, given the gradients at its outputs.
        cuts: the ops to apply them to.
        waits: those of them that have to wait.
        looked_at: other ops whose data is looked at.
        inside: whether those that wait need what a checkpoint hands out in a run of the engine.
        retain_graph: whether ops keep what they saved when they have run.
    """
    late: list[tuple[Node, Gradients]] = []
    missed = dict.fromkeys(cuts)

    def see(node: Node, gradients: Gradients) -> None:
        missed.pop(node)
        if node in waits:
            late.append((node, gradients))
        else:
            apply(node, gradients)

    def apply_late() -> None:
        for node, gradients in late:
            apply(node, gradients)
        for node in looked_at:
            found.rows.add_packed(node, partial(engine.saved, node))

    with torch.no_grad():  # as inside the engine
        engine.visit(losses.root, None, found.passed, found.ends, see, retain_graph=retain_graph)
        late += [(node, (None,) * len(found.layouts[node])) for node in missed]
        if inside or looked_at:
            engine.run_inside_engine(apply_late)
        else:
            apply_late()


def _forms_at(
    node: Node, cuts: list[UseSite], gradients: Gradients, found: Found, samples: int, options: Options
) -> list[SampleGrads]:
    """Return the gradients of each use by one op, by its rule."""
    cache: dict[str, Any] = {}
    layouts, forms = found.layouts[node], []
    for cut in cuts:
        ctx = RuleContext(cut.op, node, cut.position, cut.shape, gradients, layouts, samples, options.coupling, cache)
        if node in found.rows.packed:
            found.rows.add_packed(node, ctx.saved)
        forms.append(ops.apply(ctx))
    return forms


def _look_at_packed_data(found: Found) -> None:
    """Look at data that ops keep in a checkpoint, for rows that several samples use."""
    packed = found.rows.waiting(())

    def look() -> None:
        for node in packed:
            found.rows.add_packed(node, partial(engine.saved, node))

    if packed:
        engine.run_inside_engine(look)
        found.rows.refuse_conflict()


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


def _refuse_opaque(cuts: list[UseSite], leaves: dict[Node, str]) -> None:
    for cut in cuts:
        if graph.is_custom(cut.node) and not ops.has_rule(cut.node):
            below = [leaves[leaf] for leaf in cut.leaves]
            compiled = graph.op(cut.node) == "CompiledFunctionBackward"
            rule = f"Give it a rule: gradrein.register_rule({graph.op(cut.node).removesuffix('Backward')}, rule)"
            advice = "Compile the whole step with gradrein.compile instead" if compiled else rule
            raise UnsupportedOperationError(
                f"per_sample: `{', '.join(below)}` is used by `{graph.op(cut.node)}`, a custom Function (or "
                f"a compiled region) that cannot be looked into. {advice}; or pass allow_opaque=True to run its "
                "backward once per sample.",
                graph.op(cut.node),
                below[0] if below else "",
            )
