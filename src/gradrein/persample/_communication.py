"""Graphs that communicate on plain tensors: models that are spread over ranks in a way nobody can tell.

Each rank has plain parameters that may be shards, copies or its own. What they are is not recorded, so norms of whole
gradients cannot be put together.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.autograd.graph import Node

from .. import graph
from .._torch.process_group import is_collective, messages_sent
from ..errors import UnsupportedOperationError
from .engine import Losses


def refuse_communication(losses: Losses, *, expected: bool) -> AbstractContextManager[None]:
    """Refuse a graph with collectives on plain tensors: those of torch, and those that are run while this is active.

    Args:
        losses: what is differentiated.
        expected: ranks communicate for the sake of DTensors or of `fully_shard`. Then own Functions are not looked at;
            among DTensors they are refused in any case.

    Raises:
        UnsupportedOperationError: there is a collective.
    """
    return _refuse(losses, expected) if losses.scan.custom else nullcontext()


@contextmanager
def _refuse(losses: Losses, expected: bool) -> Iterator[None]:
    for node in losses.scan.custom:
        if is_collective(node):
            raise _refusal(node, "is a collective")
    own = [node for node in losses.scan.custom if not _made_by(node).startswith("torch.")]
    before = messages_sent() if own and not expected else {}
    yield
    if before and any(count != before.get(name, count) for name, count in messages_sent().items()):
        raise _refusal(own[0], "or another custom Function has run a collective in its backward")


def _made_by(node: Node) -> str:
    module: str = getattr(type(node), "_forward_cls", type(node)).__module__
    return module


def _refusal(node: Node, what: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"per_sample: `{graph.op(node)}` {what}, on plain tensors. Plain tensors do not say whether the parameters of "
        "this rank are shards or copies, so the gradients of whole samples cannot be assembled. Distribute the model "
        "with parallelize_module or fully_shard, whose DTensors do.",
        graph.op(node),
    )
