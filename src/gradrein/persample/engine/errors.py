"""torch's errors about a graph that can no longer be asked, in our words and with what to do."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor

from ... import graph
from ..._torch.nodes import output_metadata
from ..._torch.saved import CHANGED_IN_PLACE, FREED
from ...errors import GradreinError, GraphFreedError, InplaceModifiedError, UnsupportedOperationError


@contextmanager
def explain_errors(where: str) -> Generator[None, None, None]:
    """While active, tell what torch's error means for `where`; errors that are not known stay as they are."""
    try:
        yield
    except RuntimeError as error:
        raise_explained(where, error)


def raise_explained(where: str, error: RuntimeError) -> NoReturn:
    """Raise what torch's error means for `where`; one that is not known, or ours, as it is."""
    explained = None if isinstance(error, GradreinError) else _explanation(where, str(error))
    if explained is None:
        raise error
    raise explained from error


def refuse_nested(losses: Tensor) -> None:
    """Refuse a graph that goes through nested tensors, which have no shape that owners could be told by.

    Raises:
        UnsupportedOperationError: there is a nested tensor.
    """
    for node in graph.walk([losses]):
        leaf = graph.is_leaf(node)
        if graph.leaf_tensor(node).is_nested if leaf else any(out.is_nested_tensor for out in output_metadata(node)):
            found = "an input" if leaf else f"what `{graph.op(node)}` makes"
            raise UnsupportedOperationError(
                f"per_sample: {found} is a nested tensor, which has no rows by which to separate samples. Pad before "
                "the first layer, nested.to_padded_tensor(0.0), and mask what was padded; or run the model on "
                "each of nested.unbind() and stack the losses.",
                graph.op(node),
            )


def _explanation(where: str, torch_says: str) -> GradreinError | None:
    if FREED in torch_says:
        return GraphFreedError(
            f"per_sample: {where} was freed, by a backward pass or by per_sample itself. Query before that, or call "
            f"per_sample with retain_graph=True. torch says: {torch_says}",
            (),
        )
    if CHANGED_IN_PLACE in torch_says:
        return InplaceModifiedError(
            f"per_sample: {where} was changed in place since the forward pass. Compute a new tensor there, or query "
            f"before the change. torch says: {torch_says}",
            (where,),
        )
    if "already unpacked once" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: {where} is needed twice, and the checkpoint around it provides it only once. Remove the "
            "checkpoint from that region.",
        )
    if "unsupported combination of layouts" in torch_says or re.search("not implemented for .*Sparse", torch_says):
        return UnsupportedOperationError(
            f"per_sample: {where} has an op on sparse tensors that torch cannot differentiate. Use another layout "
            f"there, such as COO or CSR, or to_dense(). torch says: {torch_says}"
        )
    if "donated buffers" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: {where} goes through a compiled region that overwrites what it saved, so its backward can "
            "run only once. Set torch._functorch.config.donated_buffer = False before the region is compiled, or "
            "leave it uncompiled.",
            "CompiledFunctionBackward",
        )
    if "_will_engine_execute_node" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: a hook waits for the gradients of several tensors, parameters among them, in {where}. torch "
            "runs such hooks only in backward(), not in functions that return gradients. Remove the handle that "
            f"register_multi_grad_hook returned, or register it with mode='any'. torch says: {torch_says}"
        )
    return None
