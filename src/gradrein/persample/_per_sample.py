"""The way in: losses and a model, or any parameters."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._torch.dynamo import untraced
from .._torch.modes import default_modes
from .._validate import count
from . import engine, tracing
from ._capture import capture
from .gate.arguments import Parameters, read_losses, read_parameters, read_scale, unreached
from .gate.ranks import agree, parameter_views, ranks_with_samples
from .gate.unsupported import is_hooked, refuse_collectives, refuse_unsupported
from .queries.result import PerSample
from .queries.sums import BatchGrads

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
            of a `DistributedDataParallel` or `fully_shard` model, and none for anything else. `clip_` and `weighted_`
            then give the sum over the samples of all ranks; the other results are about this rank's samples.
        memory_budget: how many bytes of gradients may be stored to save time.
        scaler: the `torch.amp.GradScaler` that has scaled the losses. Results are unscaled; what is
            written to ``.grad`` stays scaled, for ``scaler.step`` to unscale.
        retain_graph: keep the recorded graph, for `PerSample.audit` or a backward pass afterwards. False frees
            it along the way, as backward does, which takes less memory. It is still kept where a rule runs
            its op, and under checkpoints.
        allow_coupling: accept losses that depend on other samples, such as with batch normalisation in
            training mode, and return the gradient of each loss as it is.
        allow_opaque: run custom Functions and compiled regions once per sample instead of refusing them. Where there
            are hooks, the whole graph is run once per sample.

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
        UnsupportedOperationError: a parameter is used by an op whose inside the graph does not show, there is a hook
            or a reentrant checkpoint, or the model is tensor parallel.

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
    if torch.compiler.is_dynamo_compiling() and tracing.stand_ins:
        rest = (memory_budget, retain_graph, allow_coupling, allow_opaque)
        made: PerSample = tracing.stand_ins[-1](losses, parameters, (sample_groups, process_group, scaler), rest)
        return made
    options = {"allow_coupling": allow_coupling, "allow_opaque": allow_opaque, "retain_graph": retain_graph}
    return _per_sample(losses, parameters, sample_groups, process_group, scaler, memory_budget, options)


@untraced
def _per_sample(
    losses: Tensor,
    parameters: Parameters,
    sample_groups: Tensor | None,
    process_group: Any,
    scaler: Any,
    memory_budget: int,
    options: dict[str, bool],
) -> PerSample:
    count(memory_budget, "memory_budget", 0)
    scale = read_scale(scaler)
    split, ids = read_losses(losses, sample_groups)
    views = parameter_views(read_parameters(parameters))
    sharded = views.mesh is not None
    device = next(iter(views.leaves.values()), split.root).device
    model = parameters if isinstance(parameters, nn.Module) else None
    try:
        groups = ranks_with_samples(parameters, views.mesh, process_group, device)
        refuse_unsupported(split, views.leaves)
        with views.gathered(), default_modes(), refuse_collectives(split, expected=sharded):
            split.has_hooks = is_hooked(split.scan, views.leaves, sharded=sharded, allowed=options["allow_opaque"])
            grads, source, left = capture(split, views.leaves, model, memory_budget, **options)
    except Exception:
        engine.refuse_nested(split.root)
        raise
    if split.samples and not grads and not groups:
        raise unreached(views.held)
    return PerSample(
        BatchGrads(grads, split.samples, views.held, left),
        source=source,
        losses=split if options["retain_graph"] else None,
        parameters=views,
        agree=partial(agree, groups, ids),
        scale=scale,
    )
