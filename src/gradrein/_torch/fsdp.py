"""DDP, FSDP1 and `fully_shard`: their parameters, states and hooks."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from ..errors import RankError
from .nodes import op

_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_is_searched = False


def is_own_hook(frame: FrameType) -> bool:
    """Return whether a function that begins is the hook that `fully_shard` sets on the outputs of its modules."""
    module = sys.modules.get(_STATE)
    return module is not None and frame.f_code is module.FSDPState._pre_backward.__code__


@contextmanager
def searched() -> Iterator[None]:
    """While active, a backward pass inside `gathered` is only looking for hooks: none of `fully_shard` ends it."""
    global _is_searched
    _is_searched = True
    try:
        yield
    finally:
        _is_searched = False


def _unless_searched(run: Callable[[], None]) -> Callable[[], None]:
    return lambda: None if _is_searched else run()


def is_passthrough(node: Any) -> bool:
    """Return whether the node is an identity that FSDP, DDP or a module inserts to hook the backward pass."""
    made_by = getattr(type(node), "_forward_cls", None)
    names = {
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": "RegisterPostBackwardFunction",
        "torch.nn.parallel.distributed": "_DDPSink",
        "torch.nn.modules._functions": "BackwardHookFunction",
    }
    return made_by is not None and any(
        made_by is getattr(sys.modules.get(module), name, None) for module, name in names.items()
    )


def is_flattened(leaf: Tensor) -> bool:
    """Return whether a leaf is the flat parameter of FullyShardedDataParallel."""
    return bool(getattr(leaf, "_is_flat_param", False))


def waits_for_first_backward(node: Any) -> bool:
    """Return whether DDP with a static graph has inserted this node, which reduces gradients when it runs."""
    return op(node) == "_DDPSinkBackward" and bool(node.ddp_weakref().static_graph)


def sharded_states(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the `fully_shard` states of the models that hold any of these parameters."""
    module = sys.modules.get(_STATE)
    if module is None:
        return []
    references = sys.modules["torch.distributed._composable_state"]._module_state_mapping.values()
    wanted = {id(tensor) for tensor in tensors}
    states_by_id: dict[int, Any] = {}
    for state in [reference() for reference in references]:
        if isinstance(state, module.FSDPState) and not wanted.isdisjoint(_ids_under(state)):
            states_by_id |= {id(one): one for one in [*state._state_ctx.all_states, state]}
    return list(states_by_id.values())


def _ids_under(state: Any) -> Iterator[int]:
    yield from (id(tensor) for module in state._modules for tensor in module.parameters())
    yield from (id(tensor) for forms in shards([state]) for tensor in forms)


def shards(states: Iterable[Any]) -> list[tuple[Tensor, ...]]:
    """Return each parameter as the optimizer holds it, as the recorded graph knows it, and in other forms it takes."""
    held = [param for state in states for group in _groups(state) for param in group.fsdp_params]
    names = ("_unsharded_param", "_sharded_post_forward_param")
    others = ([getattr(param, name, None) for name in names] for param in held)
    return [
        (param.sharded_param, *(param.sharded_param if form is None else form for form in forms))
        for param, forms in zip(held, others, strict=True)
    ]


def data_meshes(states: Iterable[Any]) -> dict[int, Any]:
    """Return the mesh over which samples lie, by the id of each parameter as the optimizer holds it.

    Of a parameter that is cut by tensor parallelism as well, this is a part of the mesh that it lies on.
    """
    held = [param for state in states for group in _groups(state) for param in group.fsdp_params]
    return {id(param.sharded_param): param.mesh_info.mesh for param in held}


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters that are gathered together; a state had at most one before it had several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def versions(states: Iterable[Any]) -> list[int]:
    """Return how often each parameter was changed in place."""
    return [forms[0]._version for forms in shards(states)]


def _unshard(group: Any) -> None:
    try:
        group.unshard()
        group.wait_for_unshard()
    except RuntimeError as error:
        raise RankError(
            "per_sample: parameters sharded by fully_shard could not be gathered. Every rank has to make the same "
            f"queries; look at the first error in their logs. torch says: {error}"
        ) from error


@contextmanager
def gathered(states: Iterable[Any]) -> Iterator[None]:
    """Unshard parameters, keep them whole whatever runs, then reshard them.

    The engine's passes then communicate nothing, so ranks may differ in how many they need.
    """
    states = list(states)
    groups = [group for state in states for group in _groups(state)]
    before = [
        *((state._state_ctx, "iter_forward_root") for state in states),
        # A checkpoint that is computed again stops half-way, and leaves behind that a forward pass is running.
        *((stateful, "_training_state") for stateful in (*states, *groups)),
        *((group, name) for group in groups for name in ("reduce_grads", "reshard_after_backward")),
        *((group, "post_forward_mesh_info") for group in groups),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name in before]
    first_call = "_register_root_post_backward_final_callback"  # what each of its hooks does first
    try:
        for state in states:
            setattr(state, first_call, _unless_searched(getattr(state, first_call)))
        for group in groups:
            _unshard(group)
            group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info = False, False, None
        yield
    finally:
        for state in states:
            vars(state).pop(first_call, None)
        for owner, name, value in saved:
            setattr(owner, name, value)
        for group in groups:
            group.reshard()
