"""What our own engine cannot do right, found before it starts."""

import gc

import torch
from torch.autograd.graph import Node

from .. import graph
from ..errors import ReplayError
from . import _torch


def refuse_unreplayable(read: graph.Graph) -> None:
    """Raise for a graph whose gradients are completed by something that runs only inside torch's engine."""
    for node in read.nodes:
        if graph.is_custom(node):
            _refuse_node(node)
    held = _held_by_ddp(read)
    if held:
        raise ReplayError(
            f"{held} leaves of this graph belong to a DistributedDataParallel model, whose gradients are "
            "averaged over processes by hooks that run only in torch's engine: replay would return this "
            "process's share as if it were the whole. Use bridle.trace to watch such a pass."
        )


def _refuse_node(node: Node) -> None:
    if graph.op(node) == "CheckpointFunctionBackward":
        raise ReplayError(
            "the graph holds a reentrant checkpoint (CheckpointFunctionBackward), which writes the gradients "
            "of its parameters from inside and cannot return them. Use checkpoint(..., use_reentrant=False)."
        )
    if _torch.communicates(node) or graph.op(node) == "_DDPSinkBackward":
        raise ReplayError(
            f"the graph holds {graph.op(node)}, which communicates between processes as part of torch's "
            "engine. Use bridle.trace to watch such a pass."
        )


def _held_by_ddp(read: graph.Graph) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    ddp = torch.nn.parallel.DistributedDataParallel
    models = [o for o in gc.get_objects() if issubclass(type(o), ddp)]
    owned = {id(p) for model in models for p in model.parameters()}
    return sum(id(leaf) in owned for leaf in read.leaves)
