"""What private training cannot vouch for is refused here: before it begins, and before each step."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from .._torch.dtensor import any_dtensor, is_dtensor, stored_shard
from ..errors import ArgumentTypeError, PrivacyError, RankError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Watched:
    """The parameters and buffers of a model: only `Private.step` may change any, and parameters only.

    Attributes:
        parameters: those that are trained, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.parameters = model, trained(model)
        self.accept(buffers=True)

    def accept(self, *, buffers: bool = False) -> None:
        """Take parameters as they are, and buffers too if a checkpoint was loaded."""
        self._versions = [stored_shard(p)._version for p in self.parameters.values()]
        if buffers:
            self._buffers = {n: (b, b._version, b.detach().clone()) for n, b in self._model.named_buffers()}

    def check(self) -> None:
        """Refuse to go on if anything was changed, or is about to be, by somebody else."""
        now, sharded = trained(self._model), any_dtensor(self.parameters.values())  # FSDP puts others there for a while
        if now.keys() != self.parameters.keys() or not (
            sharded or all(now[n] is p for n, p in self.parameters.items())
        ):
            raise PrivacyError(
                "Private.step: other parameters require a gradient than when Private was made. Make a new Private; "
                "epsilons add up."
            )
        for (name, p), version in zip(self.parameters.items(), self._versions, strict=True):
            if p.grad is not None:
                raise PrivacyError(
                    f"Private.step: `{name}` has a gradient that does not come from here. Do not call backward; pass "
                    "one loss for each sample. If it was left over, call optimizer.zero_grad() first."
                )
            if stored_shard(p)._version != version:
                raise PrivacyError(
                    f"Private.step: `{name}` was changed since the last step, by another optimizer or by hand, and "
                    "epsilon covers only what Private does. After loading a checkpoint, call load_state_dict of "
                    "Private last."
                )
        for name, b in self._model.named_buffers():
            known, version, value = self._buffers.get(name, (None, 0, b))
            if known is b and b._version == version:
                continue
            if known is None or value.shape != b.shape or not torch.equal(value, b):
                raise PrivacyError(
                    f"Private.step: the buffer `{name}` has changed: it may hold data without noise, as running "
                    "statistics do. Use track_running_stats=False or eval mode, or "
                    "private.batch_norm_to_group_norm(model)."
                )
            self._buffers[name] = (b, b._version, value)  # written with what it held, as DDP does


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_model(model: Any, optimizer: Any) -> None:
    """Refuse what cannot be trained privately."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"Private: pass a torch module and a torch optimizer, found {type(model).__name__}, "
            f"{type(optimizer).__name__}."
        )
    if hasattr(model, "_orig_mod"):
        raise PrivacyError(
            "Private: the model is compiled by torch.compile. Batches change in size at each step, each of which would "
            "be compiled, and samples cannot be told apart inside. Pass the model as it was."
        )
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.training:
            raise PrivacyError(
                f"Private: `{name}` is a batch normalisation in training mode: samples enter each other's losses, and "
                "its running statistics hold data without noise. Call private.batch_norm_to_group_norm(model) before "
                "you make the optimizer, or put the layer into eval mode."
            )
    parameters, held = trained(model), [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, LBFGS):
        raise PrivacyError("Private: LBFGS evaluates the losses several times in a step. Use another optimizer.")
    missing = set(map(id, parameters.values())).symmetric_difference(id(p) for p in held if p.requires_grad)
    if missing or not parameters:
        names = [name for name, p in parameters.items() if id(p) in missing] or ["a parameter outside the model"]
        raise PrivacyError(
            f"Private: one optimizer has to hold all that is trained, and nothing else; found {names[0]} in only one "
            "of model and optimizer. Freeze what is not trained by requires_grad_(False)."
        )
    for name, p in parameters.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise PrivacyError(
                f"Private: `{name}` is {p.dtype}; sums of clipped gradients would be rounded too much. Keep what is "
                "trained in float32, and compute in half precision by torch.autocast."
            )


def ranks_of(model: nn.Module, parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Return this rank and how many train together: all of them, or one alone."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sizes = {p.device_mesh.size() if is_dtensor(p) else 1 for p in parameters.values()}
    sizes = {model.process_group.size()} if isinstance(model, DistributedDataParallel) else sizes
    if sizes != {world}:
        raise RankError(
            f"Private: there are {world} ranks, and the model is not wrapped by DistributedDataParallel or fully_shard "
            "over all of them. Each would train with noise of its own, and what they spend would add up. Wrap the "
            "model first."
        )
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def sum_over(value: Tensor, ranks: int) -> Tensor:
    """Return the sum of what all ranks have."""
    if ranks > 1:
        dist.all_reduce(value)
    return value


def from_first(value: Tensor, rank: int, ranks: int) -> Tensor:
    """Return what the first rank has."""
    return sum_over(value * (rank == 0), ranks)


def require_same(state: Tensor, rank: int, ranks: int) -> None:
    """Refuse to go on from different states: noise would differ, and models with it."""
    if sum_over((from_first(state, rank, ranks) != state).any().float(), ranks):
        raise RankError("Private: the ranks have taken different steps, or not all of them have loaded the same state.")


def batch_norm_to_group_norm(model: nn.Module) -> nn.Module:
    """Replace each batch normalisation by a group normalisation, in place; scale and shift are kept.

    The groups are the largest number up to 32 that divides the channels. A model that was trained with batch
    normalisation has to be trained again. Make the optimizer afterwards.

    Args:
        model: the model.

    Returns:
        The model, or what replaces it if it is a batch normalisation itself.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        >>> gradrein.private.batch_norm_to_group_norm(model)[1].num_groups
        6

    See Also:
        [`gradrein.private.Private`][]
    """
    if isinstance(model, _BATCH_NORMS):
        groups = max(g for g in range(1, 33) if model.num_features % g == 0)
        new = nn.GroupNorm(groups, model.num_features, model.eps, model.affine)
        new.weight, new.bias = model.weight, model.bias
        return new.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, batch_norm_to_group_norm(child))
    return model
