"""Everything private in torch that this room touches, checked on torch 2.13.0 and 2.15.0."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, overrides
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

# Ops whose backward gives wrong numbers, without an error, when torch vectorises it.
WRONG_WHEN_VECTORISED = frozenset({"AsStridedScatterBackward0"})


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
        outputs,
        grads,
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=allow_unreachable,
        accumulate_grad=accumulate,
    )


def inside_func_transform() -> bool:
    """Tell whether a `torch.func` transform is running."""
    return bool(torch._C._are_functorch_transforms_active())


def is_tensor_like(value: Any) -> bool:
    """Tell whether this is a tensor, or something that acts as one for torch's functions."""
    return bool(overrides.is_tensor_like(value))  # type: ignore[no-untyped-call]


def overrides_functions(kind: type) -> bool:
    """Tell whether tensors of this type have a say in what torch's functions do with them."""
    disabled = torch._C._disabled_torch_function_impl
    return kind is not Tensor and getattr(kind, "__torch_function__", disabled) is not disabled


def is_cpp_nested(tensor: Tensor) -> bool:
    """Tell whether this is one of the older nested tensors, which have no shape."""
    return tensor.is_nested and tensor.layout == torch.strided


def nested_sizes(tensor: Tensor) -> list[list[int]]:
    """Return the shape of each part of one of the older nested tensors."""
    sizes: list[list[int]] = tensor._nested_tensor_size().tolist()
    return sizes


def is_cpp_nested_edge(edge: GradientEdge) -> bool:
    """Tell whether the gradient that arrives at this edge is one of the older nested tensors."""
    return bool(edge.node._input_metadata[edge.output_nr].is_cpp_nested_tensor)


class Batch:
    """The first dimension of some tensors, hidden from the ops that run while this is open.

    `torch.func.vmap` would do the same, but it is silently wrong over the backward of `cdist`; this is the
    older machinery, which `torch.autograd.grad(is_grads_batched=True)` uses as well.
    """

    def __init__(self, size: int, level: int) -> None:
        self.size = size
        self._level = level

    def hide(self, tensor: Tensor) -> Tensor:
        """Hide the first dimension."""
        return torch._add_batch_dim(tensor, 0, self._level)

    def show(self, tensor: Tensor) -> Tensor:
        """Put the dimension back in front; a tensor that has none gets it by repetition."""
        return torch._remove_batch_dim(tensor, self._level, self.size, 0)

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Let ops run as if the batch were not open: random ones, for example, are refused inside."""
        torch._C._vmapmode_decrement_nesting()
        try:
            yield
        finally:
            torch._C._vmapmode_increment_nesting()


@contextmanager
def open_batch(size: int) -> Generator[Batch, None, None]:
    """Open a batch of the given size."""
    level = torch._C._vmapmode_increment_nesting()
    try:
        yield Batch(size, level)
    finally:
        torch._C._vmapmode_decrement_nesting()


@contextmanager
def replaced_apply(
    nodes: Sequence[Node], make: Callable[[Node, Callable[..., Any]], Callable[..., Any]]
) -> Generator[None, None, None]:
    """Replace, while open, what the engine calls on nodes made by a Python `torch.autograd.Function`."""
    try:
        for node in nodes:
            node.apply = make(node, node.apply)  # type: ignore[attr-defined]
        yield
    finally:
        for node in nodes:
            vars(node).pop("apply", None)
