"""Everything private in torch that this room touches, checked on torch 2.13.0 and 2.15.0."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.utils.checkpoint import GraphExecGroup

from ..graph import is_leaf, leaf_tensor

Hook = Callable[..., Any]


def run_engine(
    outputs: Sequence[Tensor | GradientEdge],
    grads: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor | GradientEdge],
    *,
    allow_unreachable: bool,
    accumulate: bool,
) -> tuple[Tensor | None, ...]:
    """Run torch's own engine; with `accumulate` gradients go to ``.grad``, else they are returned."""
    return _engine_run_backward(
        tuple(outputs),
        tuple(grads),
        retain_graph,
        create_graph,
        tuple(inputs),
        allow_unreachable=allow_unreachable,
        accumulate_grad=accumulate,
    )


def fit(gradient: Tensor, node: Node, output_nr: int) -> Tensor:
    """Bring a gradient to the shape, dtype and device of the value it belongs to, as torch's engine does.

    Nodes return gradients of broadcast inputs unreduced, and some in another dtype.
    """
    described = node._input_metadata[output_nr]
    if not described.is_nested_tensor and gradient.shape != torch.Size(described.shape):
        gradient = gradient.sum_to_size(described.shape)
    dtype = leaf_tensor(node).grad_dtype if is_leaf(node) else described.dtype
    if dtype is not None and gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    if gradient.dim() == 0 and gradient.device != described.device:
        gradient = gradient.to(described.device)
    return gradient


def output_count(node: Node) -> int:
    """Return how many gradients the node takes."""
    return len(node._input_metadata)


def zeros_for(node: Node, output_nr: int) -> Tensor:
    """Return a zero gradient for one output of the node."""
    described = node._input_metadata[output_nr]
    return torch.zeros(described.shape, dtype=described.dtype, device=described.device)


def hooks_before(node: Node) -> list[Hook]:
    """Return the hooks registered with ``node.register_prehook``."""
    return _listed(node.register_prehook(_nothing))


def hooks_after(node: Node) -> list[Hook]:
    """Return the hooks registered with ``node.register_hook``."""
    return _listed(node.register_hook(_nothing))


def _nothing(*_: Any) -> None:
    pass


def _listed(handle: Any) -> list[Hook]:
    # torch has no call that lists a node's hooks, but a new one joins the dict that holds them all.
    handle.remove()
    return list(handle.hooks_dict_ref().values())


@contextmanager
def checkpoints_recomputed_once() -> Generator[None, None, None]:
    """Let each checkpointed region be computed again once, not at every value that is unpacked."""
    if GraphExecGroup._get_current_group() is not None:
        yield
        return
    with GraphExecGroup():
        yield
