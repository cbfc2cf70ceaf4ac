"""The way in: losses and a model, or any parameters."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import graph
from .._torch.dynamo import untraced
from .._torch.modes import default_modes
from .._validate import count
from ..errors import GraphFreedError
from . import engine, tracing
from ._arguments import Parameters, read_losses, read_parameters, read_scale, refuse_unreached
from ._capture import Options, capture
from ._communication import refuse_communication
from ._parameters import parameter_forms, refuse_unreadable
from ._ranks import SampleRanks, ranks_of
from ._result import PerSample
from ._tensor_agreement import agree
from ._tensor_failures import Others, stop_together
from ._tensor_ranks import tensor_ranks
from ._tensor_uses import shard_gradient
from .engine import Losses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def per_sample(
    losses: Tensor,
    parameters: Parameters,
    *,
    sample_groups: Tensor | None = None,
    process_group: "ProcessGroup | DeviceMesh | None" = None,
    memory_budget: int = 256 << 20,
    scaler: Any = None,
    retain_graph: bool = True,
    allow_coupling: bool = False,
    allow_opaque: bool = False,
) -> PerSample:
    """Split the gradient of a batch into the gradients of its samples.

    The model is not modified: gradrein reads the graph that its forward pass recorded and determines which sample owns
    which element. Nothing is wrapped or replaced, and only checkpointed regions are run a second time.
    Query the result before calling backward, which frees the graph.

    Args:
        losses: one loss per sample, not reduced. Further dimensions, such as tokens, are summed.
        parameters: a model, a mapping or pairs of names and tensors, or tensors. Tensors that require no gradient
            are left out.
        sample_groups: for each sample the number of its group (a user, a micro-batch). Every result is
            then per group, in ascending order of these numbers.
        process_group: the process group or device mesh whose ranks each have a part of the samples. By default that
            of a `DistributedDataParallel` or `fully_shard` model, and none for anything else. (Ranks of a
            tensor-parallel mesh have the same samples; they are found from the parameters.) `clip_` and `weighted_`
            then give the sum over the samples of all ranks; the other results are about this rank's samples.
        memory_budget: how many bytes of gradients may be stored to save time. On the CPU this memory is kept for the
            next call, for as long as the model lives; 0 stores and keeps nothing.
        scaler: the `torch.amp.GradScaler` that has scaled the losses. Results are unscaled; what is
            written to ``.grad`` stays scaled, for ``scaler.step`` to unscale.
        retain_graph: keep the recorded graph, for `PerSample.audit` or a backward pass afterwards. False frees
            it along the way, as backward does, which takes less memory. It is still kept where a rule runs
            its op, and under checkpoints.
        allow_coupling: accept losses that depend on other samples, such as with batch normalisation in
            training mode, and return the gradient of each loss as it is.
        allow_opaque: run custom Functions and compiled regions once per sample instead of refusing them.

    Returns:
        A `PerSample`. It computes a quantity when you query it.

    Raises:
        ArgumentError: an argument has the wrong type or shape, or an invalid value; the message has the correct call.
        GradientTypeError: one of the parameters is not a leaf tensor.
        NoGraphError: the losses have no recorded graph.
        UnusedInputError: the losses depend on none of the parameters.
        GraphFreedError: a backward pass has freed the graph.
        InplaceModifiedError: a value that is needed was changed in place.
        BatchCouplingError: a loss depends on other samples.
        UnsupportedOperationError: a parameter is used by an op whose inside the graph does not show.
        RankError: the ranks of a tensor-parallel mesh have different samples or different models.

    Examples:
        >>> import torch, gradrein
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3., 4.], [0., 1.]])
        >>> ps = gradrein.per_sample(model(x), model)
        >>> ps.norms()
        tensor([5., 1.])
        >>> _ = ps.clip_(max_norm=1.0)
        >>> model.weight.grad
        tensor([[0.3000, 0.9000]])

    See Also:
        [`gradrein.persample.PerSample`][], [`gradrein.register_rule`][], [`gradrein.compile`][],
        [`gradrein.call_for_per_sample_grads`][]
    """
    if torch.compiler.is_dynamo_compiling() and tracing.flags.stand_in is not None:
        rest = (memory_budget, retain_graph, allow_coupling, allow_opaque)
        made: PerSample = tracing.flags.stand_in(losses, parameters, (sample_groups, process_group, scaler), rest)
        return made
    options = Options(allow_coupling, allow_opaque, retain_graph, memory_budget)
    return _stopping_together(losses, parameters, sample_groups, process_group, scaler, options)


@untraced
def _stopping_together(
    losses: Tensor,
    parameters: Parameters,
    sample_groups: Tensor | None,
    process_group: Any,
    scaler: Any,
    options: Options,
) -> PerSample:
    with stop_together(losses, parameters, process_group) as others:
        return _per_sample(losses, parameters, sample_groups, process_group, scaler, options, others)


def _per_sample(
    losses: Tensor,
    parameters: Parameters,
    sample_groups: Tensor | None,
    process_group: Any,
    scaler: Any,
    options: Options,
    others: Others,
) -> PerSample:
    count(options.memory_budget, "memory_budget", 0)
    scale = read_scale(scaler)
    split, ids = read_losses(losses, sample_groups)
    where = parameter_forms(read_parameters(parameters))
    refuse_unreadable(split.root)
    device = next((leaf.device for leaf in where.leaves.values()), split.root.device)
    allowed = options if where.mesh is None else replace(options, sharded=True)
    model = parameters if isinstance(parameters, nn.Module) else None
    try:
        tensor = others.tensor = tensor_ranks(where.leaves, split, device)
        ranks = others.samples = ranks_of(parameters, where.mesh, process_group, device, ids, tensor.groups)
        same = _settings(allowed, model, ranks)
        with where.gathered(), default_modes():
            others.are_told = True
            agree(tensor, where.leaves, split, same)
            with refuse_communication(split, expected=bool(tensor.groups) or where.mesh is not None):
                captured = capture(split, where.leaves, model, allowed)
    except Exception:
        engine.refuse_nested(split.root)
        raise
    if captured.losses is not split:  # reentrant checkpoints were opened: what did they hide?
        refuse_unreadable(captured.losses.root)
        agree(tensor_ranks(where.leaves, captured.losses, device), where.leaves, captured.losses, same)
    if not ranks.groups:
        refuse_unreached(where.held, bool(captured.forms), split.samples)
    return PerSample(
        split.samples,
        where,
        captured.forms,
        ranks=ranks,
        tensor=tensor,
        memory_budget=captured.budget_left,
        scale=scale,
        source=captured.source,
        eps=captured.eps,
        engine=_weighted_gradients(captured.losses, where.leaves) if options.retain_graph else _no_engine,
    )


def _settings(options: Options, model: nn.Module | None, ranks: SampleRanks) -> dict[str, Any]:
    """Return what decides, besides the graph, whether and when ranks of a tensor-parallel mesh communicate."""
    return {
        "`allow_coupling`": options.coupling,
        "`allow_opaque`": options.opaque,
        "`retain_graph`": options.retain_graph,
        "whether `parameters` is a module": model is not None,
        "the sizes of `process_group`": [group.size() for group in ranks.groups],
    }


def _weighted_gradients(losses: Losses, named: dict[str, Tensor]) -> Callable[[Tensor], dict[str, Tensor]]:
    def ask(weights: Tensor) -> dict[str, Tensor]:
        if not losses.root.requires_grad:
            return {}
        edges = [graph.edge_of(parameter) for parameter in named.values()]
        found = engine.gradients_at(losses.root, weights.to(losses.root)[losses.sample_of], edges)
        return {name: shard_gradient(g, named[name]) for name, g in zip(named, found, strict=True) if g is not None}

    return ask


def _no_engine(_: Tensor) -> dict[str, Tensor]:
    raise GraphFreedError(
        "audit: the recorded graph was freed, because per_sample was called with retain_graph=False. An audit needs "
        "the graph: call per_sample with retain_graph=True.",
        (),
    )
