"""From losses to per-sample gradients: read the graph, find the cuts, run the engine once, apply the rules."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import graph
from .._torch.dtensor import stored_shard
from .._torch.nodes import is_torchs_own
from ..errors import UnsupportedOperationError
from . import _checkpoints, engine, ops
from ._hooked import differentiate_each, refuse_coupling, refuse_dtensors, through_hooks
from ._pullback import Pulled, nothing, pull_back
from ._tensor_uses import shard_form, shard_gradient, spread_uses
from .cuts.find import Found, Source, find
from .cuts.hooks import is_hooked
from .cuts.proofs import coarsest_eps
from .engine import Losses
from .engine.losses import Gradients
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
        sharded: whether `fully_shard` holds the parameters, and sets hooks of its own.
    """

    coupling: bool
    opaque: bool
    retain_graph: bool
    memory_budget: int
    sharded: bool = False


@dataclass(frozen=True, eq=False)
class Captured:
    """Per-sample gradients in their cheapest forms.

    Attributes:
        forms: the gradients of each parameter that the losses depend on.
        source: how owners were found; None where there is nothing to find.
        eps: rounding of the coarsest dtype that gradients were computed in.
        losses: what was differentiated, with nothing hidden.
        budget_left: what is left of the memory budget.
    """

    forms: dict[str, SampleGrads]
    source: Source | None
    eps: float
    losses: Losses
    budget_left: int


def capture(losses: Losses, parameters: dict[str, Tensor], model: nn.Module | None, options: Options) -> Captured:
    """Return per-sample gradients of every parameter that the losses depend on."""
    losses = _checkpoints.inline_checkpoints(losses)
    names = {id(tensor): name for name, tensor in parameters.items()}
    nodes, tensors = losses.scan.nodes, losses.scan.leaves
    leaves = {nodes[i]: names[id(tensor)] for i, tensor in tensors.items() if id(tensor) in names}
    if losses.samples <= 1:
        few = _used(leaves, parameters)
        return Captured(_few_samples(losses, few, options), None, 0.0, losses, options.memory_budget)
    known = ModelTensors(parameters, model, losses.root.numel())
    hooked = {name: leaf for name, leaf in parameters.items() if leaf._backward_hooks}
    refuse_dtensors(hooked)
    with structure():
        is_free = not is_hooked(losses.scan, sharded=options.sharded)
        found = find(leaves, losses, known, allow_coupling=options.coupling) if is_free else None
        seen = refuse_coupling(leaves, losses, known) if found is None and not options.coupling else None
    if found is not None and losses.scan.custom and not options.opaque:
        _refuse_opaque(found.cuts, leaves)
    if found is not None and all(map(_is_linear, losses.scan.custom)):
        run = _Run(found, leaves, losses, options, hooked)
        if not run.needs_engine:
            whole = {name: merged(run.forms[name]) for name in parameters if name in run.forms}
            whole |= through_hooks({name: leaf for name, leaf in hooked.items() if name in whole}, whole)
            return Captured(whole, found.source, found.eps, losses, run.budget_left)
    hooks_run = found is None or bool(hooked)
    used = _used(leaves, parameters)
    forms = differentiate_each(losses, used, seen, retain_graph=options.retain_graph, hooks_run=hooks_run)
    if seen is not None:
        refuse_coupling(leaves, losses, known, seen)
    return Captured(forms, Source.ALONE, coarsest_eps(losses.scan.nodes), losses, options.memory_budget)


def _used(leaves: dict[Node, str], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    used = set(leaves.values())
    return {name: leaf for name, leaf in parameters.items() if name in used}


class _Run:
    """One run of the engine, in which the rules make per-sample gradients of every use of every parameter.

    Attributes:
        forms: the gradients of each use, by the name of the parameter.
        budget_left: what is left of the memory budget.
        needs_engine: whether a parameter with hooks has gradients that only the engine brings to them as they are.
    """

    def __init__(
        self,
        found: Found,
        leaves: dict[Node, str],
        losses: Losses,
        options: Options,
        hooked: Collection[str],
    ) -> None:
        self._found, self._leaves, self._losses, self._options = found, leaves, losses, options
        self._hooked, self.needs_engine = hooked, False
        bypassed = engine.bypassed(losses.root)
        if bypassed:
            _checkpoints.refuse_hidden_weights(found.cuts)
        self._cuts: dict[Node, list[UseSite]] = {}
        for cut in found.cuts:
            self._cuts.setdefault(cut.node, []).append(cut)
        self._uses = Counter([leaves[leaf] for cut in found.cuts for leaf in cut.leaves])
        self.forms: dict[str, list[SampleGrads]] = {name: [] for name in self._uses}
        self.budget_left = options.memory_budget
        self._packed = found.rows.packed
        # A checkpoint hands out each saved value once in a run of the engine: to an op, or to its rule.
        all_wait = not self._packed.isdisjoint(self._cuts)
        run = ops.running_op({cut.op for cut in found.cuts})
        self._spread = spread_uses(found.cuts, losses.scan)
        spread = {node for node, _ in self._spread}
        waits = {cut.node for cut in found.cuts if all_wait or cut.op in run or cut.node in spread}
        # Data that other ops keep in a checkpoint is looked at as well, for rows that several samples use.
        self._looked_at = [] if options.coupling else found.rows.waiting(self._cuts)
        self._free = not waits and not self._looked_at and not options.retain_graph and not bypassed
        self._free = self._free and not hooked  # else the graph may be needed again
        self._run(waits, all_wait)
        if not options.coupling:
            found.rows.refuse_conflict()

    def _run(self, waits: Collection[Node], inside: bool) -> None:
        """Run the engine and apply the rules on its way, or afterwards where they have to wait."""
        late: list[tuple[Node, Gradients]] = []
        missed = dict.fromkeys(self._cuts)

        def see(node: Node, gradients: Gradients) -> None:
            missed.pop(node)
            if node in waits:
                late.append((node, gradients))
            else:
                self._apply(node, gradients)

        found, losses = self._found, self._losses
        with torch.no_grad():  # as inside the engine
            engine.visit(losses.root, None, found.passed, found.ends, see, retain_graph=not self._free)
            late += [(node, (None,) * len(found.layouts[node])) for node in missed]
            if inside or self._looked_at:
                engine.inside_engine(lambda: self._apply_late(late))
            else:
                self._apply_late(late)

    def _apply_late(self, late: list[tuple[Node, Gradients]]) -> None:
        for node, gradients in late:
            self._apply(node, gradients)
        for node in self._looked_at:
            self._found.rows.add_packed(node, partial(engine.saved, node))

    def _apply(self, node: Node, gradients: Gradients) -> None:
        """Apply the rule to each use by one op."""
        cache: dict[str, Any] = {}
        layouts, samples, coupling = self._found.layouts[node], self._losses.samples, self._options.coupling
        for cut in self._cuts[node]:
            ctx = RuleContext(cut.op, node, cut.position, cut.shape, gradients, layouts, samples, coupling, cache)
            if node in self._packed:
                self._found.rows.add_packed(node, ctx.saved)
            if (node, cut.position) in self._spread:
                for leaf in cut.leaves:
                    name = self._leaves[leaf]
                    self._keep(name, shard_form(cut, ctx, self._found.owners[node], leaf, name))
                continue
            form = ops.apply(ctx)
            if self._free and form.runs_op:  # its rule gave up, and the op is about to forget what it saved
                form = Dense(engine.inside_engine(form.dense))
            for leaf in cut.leaves:
                direct = cut.value.node is leaf
                lowered = form if direct else pull_back(form, cut.value, leaf)
                name = self._leaves[leaf]
                self.needs_engine |= name in self._hooked and (lowered.is_sparse or isinstance(lowered, Pulled))
                self._keep(name, lowered)

    def _keep(self, name: str, form: SampleGrads) -> None:
        """Write down what saves time, while what it is made of can be let go of at once."""
        if self._free and self._uses[name] == 1 and form.flops_saved > 0 and form.nbytes() <= self.budget_left:
            self.budget_left -= form.nbytes()
            form = Dense(form.dense())
        self.forms[name].append(form)


def _few_samples(losses: Losses, leaves: dict[str, Tensor], options: Options) -> dict[str, SampleGrads]:
    if losses.samples == 0:
        return {name: nothing(0, stored_shard(leaf)) for name, leaf in leaves.items()}
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    retain = options.retain_graph or bool(engine.bypassed(losses.root))
    found = engine.gradients_at(losses.root, torch.ones_like(losses.root), edges, retain_graph=retain)
    dense = {name: g.to_dense() if g.is_sparse else g for name, g in zip(leaves, found, strict=True) if g is not None}
    return {name: Dense(shard_gradient(g, leaves[name])[None]) for name, g in dense.items()}


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
