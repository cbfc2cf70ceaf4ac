"""The way in: losses and a model, or any parameters."""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import graph
from ..errors import ArgumentError, GradientTypeError, GraphFreedError, NoGraphError
from . import _engine, tracing
from ._capture import Options, capture
from ._losses import Losses
from ._parameters import parameter_forms, refuse_unreadable
from ._ranks import ranks_of
from ._result import PerSample, refuse_unreached

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Parameters: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Tensor


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
    """Split the gradient of a batch into those of its samples.

    The model is used as it stands: the graph its forward pass recorded is read, and asked which sample owns
    what. Nothing is wrapped or replaced, and nothing is run a second time but what stands under a checkpoint.
    Ask before calling backward, which frees the graph.

    Args:
        losses: one loss per sample, not reduced. Further dimensions, such as tokens, are summed.
        parameters: a model, a mapping or pairs of names and tensors, or tensors. Those that need no gradient
            are left out.
        sample_groups: for each sample the number of the group it belongs to (a user, a micro-batch). Every answer is
            then per group, in ascending order of these numbers.
        process_group: the process group, or device mesh, whose ranks each have a part of the samples. By default that
            of a `DistributedDataParallel` or `fully_shard` model, and none for anything else. `clip_` and `weighted_`
            then give the sum over the samples of all ranks; the other answers are about this rank's samples.
        memory_budget: how many bytes may be spent on written-down gradients to save time.
        scaler: the `torch.amp.GradScaler` that has scaled the losses. Answers come out unscaled; what is
            written to ``.grad`` stays scaled, for ``scaler.step`` to unscale.
        retain_graph: keep the recorded graph, for `PerSample.audit` or a backward pass afterwards. False lets go
            of it on the way, as backward does, which takes less memory; it is kept all the same where a rule runs
            its op, and under checkpoints.
        allow_coupling: accept losses that depend on other samples, such as with batch normalisation in
            training, and give the gradient of each loss as it is.
        allow_opaque: run custom Functions and compiled regions once per sample instead of refusing them.

    Returns:
        A `PerSample`; quantities are computed when they are asked for.

    Raises:
        ArgumentError: `losses` or `sample_groups` has the wrong shape.
        GradientTypeError: something among the parameters is no leaf tensor.
        NoGraphError: the losses have no recorded graph.
        UnusedInputError: the losses depend on none of the parameters.
        GraphFreedError: a backward pass has freed it.
        InplaceModifiedError: a value it needs was changed in place.
        BatchCouplingError: a loss depends on other samples.
        UnsupportedOperationError: a parameter is used by something that cannot be looked into.

    Example:
        >>> import torch, bridle
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3., 4.], [0., 1.]])
        >>> ps = bridle.per_sample(model(x), model)
        >>> ps.norms()
        tensor([5., 1.])
        >>> _ = ps.clip_(max_norm=1.0)
        >>> model.weight.grad
        tensor([[0.3000, 0.9000]])
    """
    if torch.compiler.is_dynamo_compiling() and tracing.flags.stand_in is not None:
        options = (memory_budget, retain_graph, allow_coupling, allow_opaque)
        made: PerSample = tracing.flags.stand_in(losses, parameters, (sample_groups, process_group, scaler), options)
        return made
    split, ids = _losses(losses, sample_groups)
    where = parameter_forms(_named(parameters))
    refuse_unreadable(split.root)
    device = next((leaf.device for leaf in where.leaves.values()), split.root.device)
    ranks = ranks_of(parameters, where.mesh, process_group, device, ids)
    allowed = Options(allow_coupling, allow_opaque, retain_graph, memory_budget, where.mesh is not None)
    with where.gathered():
        captured = capture(split, where.leaves, parameters if isinstance(parameters, nn.Module) else None, allowed)
    if captured.losses is not split:  # reentrant checkpoints were opened: what did they hide?
        refuse_unreadable(captured.losses.root)
    if not ranks.groups:
        refuse_unreached(where.held, captured.forms, split.samples)
    return PerSample(
        split.samples,
        where,
        captured.forms,
        ranks=ranks,
        memory_budget=captured.budget_left,
        scale=1.0 if scaler is None else float(scaler.get_scale()),
        source=captured.source,
        eps=captured.eps,
        engine=_weighted_gradients(captured.losses, where.leaves) if retain_graph else _no_engine,
    )


def _weighted_gradients(losses: Losses, named: dict[str, Tensor]) -> Callable[[Tensor], dict[str, Tensor]]:
    def ask(weights: Tensor) -> dict[str, Tensor]:
        if not losses.root.requires_grad:
            return {}
        edges = [graph.edge_of(parameter) for parameter in named.values()]
        found = _engine.gradients_at(losses.root, weights.to(losses.root)[losses.sample_of], edges)
        return {name: g for name, g in zip(named, found, strict=True) if g is not None}

    return ask


def _no_engine(_: Tensor) -> dict[str, Tensor]:
    raise GraphFreedError(
        "audit: the recorded graph was freed, because per_sample was called with retain_graph=False. An audit asks "
        "autograd for its own gradients: make it with retain_graph=True.",
        (),
    )


def _losses(losses: Tensor, groups: Tensor | None) -> tuple[Losses, Tensor | None]:
    """Return what is differentiated, and the numbers of the groups."""
    if losses.dim() == 0:
        raise ArgumentError(
            "per_sample: `losses` is a single number. Pass one loss per sample; most losses give that with "
            "reduction='none'."
        )
    # A rank without samples need not have run the model.
    if not losses.requires_grad and losses.shape[0]:
        raise NoGraphError(
            "per_sample: `losses` has no recorded graph. Was it computed under no_grad, detached, or from "
            "parameters that need no gradient?",
            (),
        )
    count = losses.shape[0]
    with torch.enable_grad():
        root = losses.reshape(count, prod(losses.shape[1:])).sum(1)
    if groups is None:
        with tracing.structure():
            return Losses(root, torch.arange(count, device=root.device), count), None
    if not isinstance(groups, Tensor):
        raise ArgumentError(
            f"per_sample: `sample_groups` must be a tensor with one number per sample, found "
            f"{type(groups).__name__}. (Ranks are named by `process_group`.)"
        )
    if tuple(groups.shape) != (count,):
        raise ArgumentError(
            f"per_sample: `sample_groups` must have one number per sample, shape ({count},), found "
            f"{tuple(groups.shape)}."
        )
    numbers, sample_of = torch.unique(groups.to(root.device), return_inverse=True)
    return Losses(root, sample_of, len(numbers)), numbers


def _named(parameters: Parameters) -> dict[str, Tensor]:
    pairs: list[tuple[Any, Any]]
    if isinstance(parameters, nn.Module):
        pairs = list(parameters.named_parameters())
    elif isinstance(parameters, Mapping):
        pairs = list(parameters.items())
    elif isinstance(parameters, Tensor):
        pairs = [("0", parameters)]
    else:
        items = list(parameters)
        pairs = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(items)]
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise GradientTypeError(f"per_sample: parameter {name!r} is no tensor but {type(tensor).__name__}.")
        if tensor.requires_grad and not tensor.is_leaf:
            raise GradientTypeError(
                f"per_sample: {name!r} was computed from other tensors. Pass the parameters themselves, such "
                "as model.named_parameters()."
            )
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            named[str(name)] = tensor
    return named
