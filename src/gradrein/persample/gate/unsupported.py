"""Graphs that cannot be split into samples, refused by name: how a model is distributed or checkpointed, and hooks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ... import graph
from ..._torch import checkpoint, fsdp
from ..._torch.dtensor import dtensors_among, is_crossing, is_dtensor
from ..._torch.hooks import has_hooks, hooks_registered
from ..._torch.nodes import is_torchs_own
from ..._torch.process_group import is_collective, is_scheduled, messages_sent
from ..._torch.signature import Scan
from ...errors import UnsupportedOperationError
from ..engine import Losses
from ..tracing import structure


def refuse_unsupported(losses: Losses, leaves: Mapping[str, Tensor]) -> None:
    """Refuse graphs whose gradients belong to no one sample of this process, or that the engine may not run through.

    Args:
        losses: what is differentiated.
        leaves: the parameters.

    Raises:
        UnsupportedOperationError: the model is tensor parallel, a part of a pipeline, or uses checkpoints, wrappers or
            collectives that hide what is needed.
    """
    for node in losses.scan.custom:
        _refuse_node(node)
    if dist.is_available() and dist.is_initialized():
        _refuse_dtensors(losses, leaves)
        for leaf in losses.scan.leaves.values():
            _refuse_leaf(leaf)


def _refuse_node(node: Node) -> None:
    if checkpoint.is_reentrant(node):
        raise UnsupportedOperationError(
            f"per_sample: `{graph.op(node)}` is a reentrant checkpoint, which hides the graph of its region. Pass "
            "use_reentrant=False to torch.utils.checkpoint.checkpoint, or "
            'gradient_checkpointing_kwargs={"use_reentrant": False} to a model of transformers.',
            graph.op(node),
        )
    if is_collective(node):
        raise _collective(node, "is a collective")
    if fsdp.waits_for_first_backward(node):
        raise UnsupportedOperationError(
            "per_sample: DistributedDataParallel(static_graph=True) records its graph in the first backward "
            "pass, and per_sample is not one. Leave out static_graph, or compute the losses with `model.module`."
        )


def _refuse_dtensors(losses: Losses, leaves: Mapping[str, Tensor]) -> None:
    """Refuse DTensors: each enters a graph as a leaf or by a crossing. Those of `fully_shard` are in no graph."""
    if is_dtensor(losses.root):
        raise UnsupportedOperationError(
            "per_sample: `losses` is a DTensor. Pass the losses of this rank's own samples as a plain tensor."
        )
    name = next((f"parameter `{name}`" for name, leaf in leaves.items() if is_dtensor(leaf)), "")
    crossing = any(map(is_crossing, losses.scan.custom)) or dtensors_among(losses.scan.leaves.values())
    if name or crossing:
        raise UnsupportedOperationError(
            f"per_sample: {name or 'a value that the losses depend on'} is a DTensor, as in tensor parallelism, of "
            "which each rank computes with its own part. Distribute the model with fully_shard or "
            "DistributedDataParallel instead. (gradrein.clip_grad_norm_ and gradrein.clip_ do take DTensors.)"
        )


def _refuse_leaf(leaf: Tensor) -> None:
    if fsdp.is_flattened(leaf):
        raise UnsupportedOperationError(
            "per_sample: the model is wrapped in FullyShardedDataParallel, which flattens its parameters into one. "
            "Use torch.distributed.fsdp.fully_shard instead, which works."
        )
    if not isinstance(leaf, nn.Parameter) and is_scheduled():
        raise UnsupportedOperationError(
            "per_sample: the losses are those of the last stage of a pipeline schedule, and are computed from an "
            f"activation of shape {tuple(leaf.shape)} that another stage has sent. The other stages hold the rest "
            "of each sample's gradient, and the schedule sends them sums over the micro-batch only. Distribute "
            "the model with fully_shard instead."
        )


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a module of `fully_shard` whose backward pass is to be split while it runs.

    Raises:
        UnsupportedOperationError: it is one.
    """
    if fsdp.sharded_states(module.parameters()):
        raise UnsupportedOperationError(
            "call_for_per_sample_grads: the module is sharded by fully_shard, and a backward pass through it would "
            "gather its parameters a different number of times on each rank. Use gradrein.per_sample, which gathers "
            "them itself."
        )


@contextmanager
def refuse_collectives(losses: Losses, *, expected: bool) -> Iterator[None]:
    """Refuse custom Functions that run a collective in their backward while this is active.

    The parameters of such a model are plain tensors that may be shards, copies or a rank's own. What they are is not
    recorded, so norms of whole gradients cannot be put together.

    Args:
        losses: what is differentiated.
        expected: whether ranks communicate for the sake of `fully_shard`. Then Functions are not looked at.

    Raises:
        UnsupportedOperationError: there was a collective.
    """
    own = [node for node in losses.scan.custom if not is_torchs_own(node)]
    before = messages_sent() if own and not expected else {}
    yield
    if before and any(count != before.get(name, count) for name, count in messages_sent().items()):
        raise _collective(own[0], "or another custom Function has run a collective in its backward")


def _collective(node: Node, what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: `{graph.op(node)}` {what}, on plain tensors. Plain tensors do not say whether the parameters of "
        "this rank are shards or copies, so the gradients of whole samples cannot be assembled. Distribute the model "
        "with fully_shard.",
        graph.op(node),
    )


def is_hooked(scan: Scan, parameters: Mapping[str, Tensor], *, sharded: bool, allowed: bool) -> bool:
    """Return whether there are hooks in a graph or on parameters, other than those of `fully_shard`.

    Args:
        scan: the graph.
        parameters: what is asked about.
        sharded: whether `fully_shard` holds the parameters, and sets hooks of its own.
        allowed: whether there may be hooks.

    Raises:
        UnsupportedOperationError: there is a hook, and that was not allowed.
    """
    if not hooks_registered():
        return False
    hooked = next((f"`{name}`" for name, leaf in parameters.items() if leaf._backward_hooks), "")
    nodes = [node for i, node in enumerate(scan.nodes) if i not in scan.leaves]
    with structure(), fsdp.searched() if sharded else nullcontext():  # also while a step is traced: no part of it
        if not hooked and has_hooks(nodes, *([fsdp.is_own_hook] if sharded else [])):
            hooked = "a value or an op that the losses depend on"
    if hooked and not allowed:
        raise UnsupportedOperationError(
            f"per_sample: a hook is registered on {hooked}, such as by register_hook or register_full_backward_hook. "
            "It may change gradients or mix samples. Remove it: handle.remove(). Or pass allow_opaque=True: each loss "
            "is then differentiated alone, in one backward pass per sample, each of which runs the hook.",
            "",
            hooked.strip("`") if hooked.startswith("`") else "",
        )
    return bool(hooked)


def as_at_the_call(value: GradientEdge) -> Callable[[], None]:
    """Return what refuses to run the graph below a value once a hook was registered there after this call."""
    before = hooks_registered()

    def refuse_new_hooks() -> None:
        if hooks_registered() == before:
            return
        for node in graph.walk([value]):
            if graph.leaf_tensor(node)._backward_hooks if graph.is_leaf(node) else has_hooks([node]):
                raise UnsupportedOperationError(
                    f"per_sample: a hook was registered on a parameter, or on what `{graph.op(node)}` makes of one, "
                    "since the call. Register it before per_sample, or query before you register it.",
                    graph.op(node),
                )

    return refuse_new_hooks
