"""From losses to per-sample gradients: read the graph, find the cuts, run the engine once, apply the rules."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from .. import graph
from .._torch import fsdp
from ..errors import UnsupportedOperationError
from . import _checkpoints, _engine, rules
from ._losses import Losses
from ._pullback import nothing, pull_back, through_hooks
from .ownership.coupling import Known
from .ownership.cuts import UseSite, leaves_below
from .ownership.find import Found, Source, find
from .ownership.hooks import note_moment
from .representations.base import Dense, SampleGrads
from .representations.sum import merged
from .rules.context import RuleContext
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
    read = losses.read
    names = {id(tensor): name for name, tensor in parameters.items()}
    leaves = {
        node: names[id(tensor)]
        for node in read.nodes
        if graph.is_leaf(node) and id(tensor := graph.leaf_tensor(node)) in names
    }
    if losses.samples <= 1:
        used = set(leaves.values())
        few = {n: p for n, p in parameters.items() if n in used}
        return Captured(_few_samples(losses, few, options), None, 0.0, losses, options.memory_budget)
    known = Known(parameters, model, losses.root.numel())
    search = partial(find, leaves, losses, known, allow_coupling=options.coupling)
    with structure():
        found = search(hooks_allowed=options.sharded)
    before = fsdp.hooks_run()
    forms, budget_left = _forms(found, leaves, losses, options)
    if found.source is not Source.ASKED and found.hooks != fsdp.hooks_run() - before:
        # Others than those of fully_shard are among the hooks: nothing is proved.
        found = search(hooks_allowed=False)
        forms, budget_left = _forms(found, leaves, losses, options)
    note_moment()
    order = [name for name in parameters if name in forms]
    dtypes = {out.dtype for node in found.layouts for out in graph.describe(node)}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    whole = {name: through_hooks(parameters[name], merged(forms[name])) for name in order}
    return Captured(whole, found.source, eps, losses, budget_left)


def _forms(
    found: Found, leaves: dict[Node, str], losses: Losses, options: Options
) -> tuple[dict[str, list[SampleGrads]], int]:
    """Return the gradients of each use of each parameter, and what is left of the memory budget."""
    cuts, layouts = found.cuts, found.layouts
    _checkpoints.refuse_hidden_weights(cuts, losses)
    if not options.opaque:
        _refuse_opaque(cuts, leaves)
    at: dict[Node, list[int]] = {}
    for i, cut in enumerate(cuts):
        at.setdefault(cut.node, []).append(i)
    below = [[leaf for leaf in leaves_below(cut.value.node) if leaf in leaves] for cut in cuts]
    uses = Counter(leaves[leaf] for some in below for leaf in some)
    forms: dict[str, list[SampleGrads]] = {name: [] for name in uses}
    budget_left = options.memory_budget
    late: list[tuple[Node, tuple[Tensor | None, ...]]] = []
    missed = dict.fromkeys(at)
    packed = any(_engine.is_packed(node) for node in at)
    # A checkpoint hands out each saved value once in a run of the engine: to an op, or to its rule.
    waits = {node for node in at if packed or rules.runs_op(graph.op(node))}
    free = not waits and not options.retain_graph and not _engine.bypassed(losses.root)
    free = free and (found.source is Source.ASKED or not found.hooks)  # else it may have to be run again

    hooked = found.source is Source.ASKED and found.hooks != 0

    def apply(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        cache: dict[str, Any] = {}
        for i in at[node]:
            shape, position = _shape(cuts[i].value), cuts[i].position
            ctx = RuleContext(node, position, shape, gradients, layouts[node], losses.samples, options.coupling, cache)
            if i == at[node][0] and _engine.is_packed(node):
                found.rows.add(node, found.owners[node], ctx.saved)
            with torch.no_grad():
                form = rules.apply(ctx)
                if free and form.runs_op:  # its rule gave up, and the op is about to forget what it saved
                    form = Dense(_engine.inside_engine(form.dense))
                for leaf in below[i]:
                    keep(leaves[leaf], pull_back(form, cuts[i].value, leaf, hooked=hooked))

    def keep(name: str, form: SampleGrads) -> None:
        """Write down what saves time, while what it is made of can be let go of at once."""
        nonlocal budget_left
        if free and uses[name] == 1 and form.flops_saved() > 0 and form.nbytes() <= budget_left:
            budget_left -= form.nbytes()
            form = Dense(form.dense())
        forms[name].append(form)

    def see(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        missed.pop(node)
        if node in waits:
            late.append((node, gradients))
        else:
            apply(node, gradients)

    losses.visit(at, torch.ones(losses.samples), see, retain_graph=not free)
    late += [(node, (None,) * len(layouts[node])) for node in missed]
    if packed:
        _engine.inside_engine(lambda: list(starmap(apply, late)))
    else:
        list(starmap(apply, late))
    if not options.coupling:
        found.rows.refuse_conflict()
    return forms, budget_left


def _shape(value: GradientEdge) -> tuple[int, ...]:
    if graph.is_leaf(value.node):
        return tuple(graph.leaf_tensor(value.node).shape)
    return graph.describe(value.node)[value.output_nr].shape


def _few_samples(losses: Losses, leaves: dict[str, Tensor], options: Options) -> dict[str, SampleGrads]:
    if losses.samples == 0:
        return {name: nothing(0, leaf) for name, leaf in leaves.items()}
    edges = [graph.edge_of(leaf) for leaf in leaves.values()]
    retain = options.retain_graph or bool(_engine.bypassed(losses.root))
    found = _engine.gradients_at(losses.root, torch.ones_like(losses.root), edges, retain_graph=retain)
    dense = {name: g.to_dense() if g.is_sparse else g for name, g in zip(leaves, found, strict=True) if g is not None}
    return {name: Dense(g[None]) for name, g in dense.items()}


def _refuse_opaque(cuts: list[UseSite], leaves: dict[Node, str]) -> None:
    for cut in cuts:
        if graph.is_custom(cut.node) and not rules.has_rule(graph.op(cut.node)):
            below = [leaves[leaf] for leaf in leaves_below(cut.value.node) if leaf in leaves]
            compiled = graph.op(cut.node) == "CompiledFunctionBackward"
            advice = "Compile the whole step with bridle.compile instead, or give" if compiled else "Give"
            raise UnsupportedOperationError(
                f"per_sample: `{', '.join(below)}` is used by `{graph.op(cut.node)}`, a custom Function (or "
                f"a compiled region) that cannot be looked into. {advice} it a rule with "
                "bridle.register_rule, or pass allow_opaque=True to run its backward once per sample, which is "
                "right if that backward is linear in the gradient it gets, as every backward should be.",
                graph.op(cut.node),
                below[0] if below else "",
            )
